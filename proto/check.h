/* Every limit of proto/message.h, checked on the structs themselves.
 *
 * codec.c calls these before it writes and after it reads, so a struct that one side could send is one
 * that the other side takes.  Each returns 0, or -1 with DS4_E_PROTOCOL naming the field, its value
 * and the range.  What depends on more than the message (is this slot open, does the block table
 * cover cap_tok, is the id below the vocabulary) is checked by the stage. */
#ifndef DS4_PROTO_CHECK_H
#define DS4_PROTO_CHECK_H

#include "proto/message.h"

int ds4_check_step(const struct ds4_step *step, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_step_done(const struct ds4_step_done *done, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_tokens(const struct ds4_tokens_out *tokens, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_hello(const struct ds4_hello *hello, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_form(const struct ds4_form *form, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_health(const struct ds4_health *health, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_fatal(const struct ds4_fatal_report *report, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_pipe_id(const struct ds4_pipe_id *id, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_note(const struct ds4_note *note, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_kv_write(const struct ds4_kv_write *write, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_kv_read(const struct ds4_kv_read *read, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_kv_unlink(const struct ds4_kv_unlink *unlink, struct ds4_err *err) DS4_MUST_CHECK;
int ds4_check_kv_done(const struct ds4_kv_done *done, struct ds4_err *err) DS4_MUST_CHECK;

#endif
