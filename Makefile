# ds4: one Makefile, no configure step, no recursion.  `make help` lists the targets.
#
# Objects mirror sources under $(BUILD)/obj; every .c below a folder is picked up by wildcard.
# CONFIG = release (default) | debug | asan | tsan | fuzz, each in its own tree build/<config>.

CONFIG      ?= release
BUILD       := build/$(CONFIG)
PREFIX      ?= /usr
DESTDIR     ?=
MARCH       ?= x86-64-v2
VERSION     := 0.1.0
COMMIT      := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
CUDA_HOME   ?= /usr/local/cuda
NVCC        ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA        ?= $(if $(NVCC),1,0)
CUDA_ARCH   ?= sm_80
STAGES      ?= 2
PORT        ?= 8000
FUZZ_SECONDS ?= 60

ifeq ($(CONFIG),fuzz)
CC := clang-14
else ifeq ($(origin CC),default)
CC := gcc
endif

WARN   := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla \
          -Wformat=2 -Wundef
OPT_release := -O2 -DNDEBUG
OPT_debug   := -O0
OPT_asan    := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT_tsan    := -O1 -fsanitize=thread -fno-omit-frame-pointer
OPT_fuzz    := -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all \
               -fno-omit-frame-pointer
PKGS   := libh2o libuv libzmq libprotobuf-c jansson libconfuse libutf8proc libxxhash libzstd \
          libsystemd
PKG_CFLAGS := $(subst -I,-isystem ,$(shell pkg-config --cflags $(PKGS) 2>/dev/null))
CFLAGS_ALL := -std=c11 -D_GNU_SOURCE -g $(OPT_$(CONFIG)) $(WARN) $(if $(WERROR),-Werror) \
              -march=$(MARCH) -ffp-contract=off -fno-common -fstack-protector-strong -pthread -I. \
              -isystem $(BUILD)/gen $(PKG_CFLAGS) -DDS4_VERSION='"$(VERSION)"' $(CFLAGS)
LDFLAGS_ALL := $(OPT_$(CONFIG)) -pthread $(LDFLAGS)

lib = $(shell pkg-config --libs $(1) 2>/dev/null)
LIBS_common := $(call lib,libconfuse jansson libxxhash libsystemd) -lm
LIBS_router := $(call lib,libh2o libuv libzmq libprotobuf-c libutf8proc)
LIBS_worker := $(call lib,libzmq libprotobuf-c libzstd) -lrt

MAINS  := router/main.c router/text_main.c worker/main.c worker/gguf_main.c
SRC_common  := $(wildcard common/*.c)
SRC_proto   := $(wildcard proto/*.c)
SRC_kernels := $(wildcard kernels/*.c kernels/cpu/*.c)
SRC_router  := $(filter-out $(MAINS),$(wildcard router/*.c router/*/*.c))
SRC_worker  := $(filter-out $(MAINS) $(if $(filter 0,$(CUDA)),worker/pipe_nccl.c),$(wildcard worker/*.c))
SRC_support := $(wildcard tests/support/*.c)
obj = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

ARCHIVES := $(foreach f,router worker kernels proto common,$(BUILD)/lib/lib$(f).a)
BINS     := $(addprefix $(BUILD)/bin/,ds4-router ds4-worker ds4-text ds4-gguf)
UNIT     := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c tests/kernels/test_*.c))
FUZZERS  := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
BENCHES  := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))

.PHONY: help all deps deps-dev check check-unit check-e2e bench fuzz format lint install demo clean
.SECONDARY:
.DELETE_ON_ERROR:

all: $(BINS) ## build the programs into build/$(CONFIG)/bin

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Only these two files may use wider vectors; the program asks the processor before it enters them.
CFLAGS_kernels/cpu/simd_scalar := -O3
CFLAGS_kernels/cpu/simd_avx2 := -O3 -mavx2
CFLAGS_kernels/cpu/simd_avx512 := -O3 -mavx512f -mavx512bw -mavx512dq -mavx512vl \
                                  -mprefer-vector-width=512

# ---- compile ------------------------------------------------------------------------------------
$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(CFLAGS_$(*)) -MMD -MP -c $< -o $@

$(BUILD)/gen/proto/ds4.pb-c.c $(BUILD)/gen/proto/ds4.pb-c.h &: proto/ds4.proto
	@mkdir -p $(BUILD)/gen
	protoc-c --c_out=$(BUILD)/gen $<
$(BUILD)/obj/proto/ds4.pb-c.o: $(BUILD)/gen/proto/ds4.pb-c.c
	@mkdir -p $(@D)
	$(CC) $(filter-out -Werror,$(CFLAGS_ALL)) -w -c $< -o $@
$(BUILD)/obj/proto/codec.o: | $(BUILD)/gen/proto/ds4.pb-c.h

$(BUILD)/lib/lib%.a:
	@mkdir -p $(@D)
	@rm -f $@
	ar rcs $@ $^
$(BUILD)/lib/libcommon.a: $(call obj,$(SRC_common))
$(BUILD)/lib/libproto.a: $(call obj,$(SRC_proto)) $(if $(wildcard proto/ds4.proto),$(BUILD)/obj/proto/ds4.pb-c.o)
$(BUILD)/lib/libkernels.a: $(call obj,$(SRC_kernels))
$(BUILD)/lib/librouter.a: $(call obj,$(SRC_router))
$(BUILD)/lib/libworker.a: $(call obj,$(SRC_worker))
$(BUILD)/lib/libsupport.a: $(call obj,$(SRC_support))

# ---- programs -----------------------------------------------------------------------------------
lib_of = $(foreach f,$(1),$(BUILD)/lib/lib$(f).a)
$(BUILD)/bin/ds4-router: $(BUILD)/obj/router/main.o $(call lib_of,router proto common)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_router) $(LIBS_common)
$(BUILD)/bin/ds4-text: $(BUILD)/obj/router/text_main.o $(call lib_of,router proto common)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_router) $(LIBS_common)
$(BUILD)/bin/ds4-worker: $(BUILD)/obj/worker/main.o $(call lib_of,worker kernels proto common)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_worker) $(LIBS_common)
$(BUILD)/bin/ds4-gguf: $(BUILD)/obj/worker/gguf_main.o $(call lib_of,worker kernels proto common)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_worker) $(LIBS_common)

# ---- tests, fuzzers, benches: one program per source file, linked with everything -----------------
LIBS_all = $(LIBS_router) $(LIBS_worker) $(LIBS_common)
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(BUILD)/lib/libsupport.a $(ARCHIVES)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDFLAGS_$(*)) \
		$(LIBS_all) -lcmocka
$(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(BUILD)/lib/libsupport.a $(ARCHIVES)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) $(if $(filter fuzz,$(CONFIG)),-fsanitize=fuzzer) -o $@ $< \
		-Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS_all)
$(BUILD)/bench/%: $(BUILD)/obj/bench/%.o $(BUILD)/lib/libsupport.a $(ARCHIVES)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS_all)

clean: ## remove everything built
	rm -rf build

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
