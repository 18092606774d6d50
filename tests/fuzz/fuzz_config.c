/* Settings from arbitrary bytes: an error or a config that prints and loads back unchanged. */
#include "common/config.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ds4_config config, again;
    struct ds4_err err = {0};
    struct ds4_buf first, second;
    int rc;

    if (ds4_config_init(&config, &err) != 0 || ds4_config_init(&again, &err) != 0)
        abort();
    ds4_buf_init(&first, (size_t)1 << 20);
    ds4_buf_init(&second, (size_t)1 << 20);
    rc = ds4_config_parse(&config, (struct ds4_str){(const char *)data, size}, "fuzz", &err);
    if (rc != 0 && err.msg[0] == '\0')
        abort();
    if (rc == 0) {
        if (ds4_config_check(&config, &err) != 0 && err.msg[0] == '\0')
            abort();
        if (ds4_config_print(&config, &first) == 0) {
            if (ds4_config_parse(&again, ds4_buf_view(&first), "printed", &err) != 0 ||
                ds4_config_print(&again, &second) != 0 ||
                !ds4_str_equal(ds4_buf_view(&first), ds4_buf_view(&second)))
                abort();
        }
    }
    ds4_buf_deinit(&first);
    ds4_buf_deinit(&second);
    ds4_config_deinit(&again);
    ds4_config_deinit(&config);
    return 0;
}
