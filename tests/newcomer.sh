#!/bin/bash
# What somebody new meets: every command of README.md and deploy/INSTALL.md as it stands, on a bare Debian 12
# made by debootstrap, and the Debian package installed and purged in a second one.  Needs root, a network
# for packages, about seven minutes on two cores and what `make check` takes there; `make check-newcomer`.
#
#   NEWCOMER_BASE=folder   a bare root made before, copied instead of made
#   NEWCOMER_CHECK=0       leave out `make check`
#   NEWCOMER_KEEP=1        keep the roots, for a look
#
# Everything happens below one temporary folder in mount and network name spaces of its own, so nothing is
# left mounted.  Services are run by the root's own systemd, booted in name spaces, where the kernel lets
# us; else, in the chroot, by tests/support/systemctl.py.  Blocks marked
# `gpu` are left out, they need cards.  Prints wall, user and system seconds of each block; ends with "N passed, N failed".
# shellcheck disable=SC2016  # what is in single quotes is for another shell
set -u
top=$(cd "$(dirname "$0")/.." && pwd)
passed=0 failed=0
TIMEFORMAT='%R s wall, %U s user, %S s system'

# A line of this script's own, so that it stands out in the output of the commands.
say() { echo "== $*"; }

verdict() {
    if [ "$1" = 0 ]; then
        passed=$((passed + 1))
        say "ok: $2"
    else
        failed=$((failed + 1))
        say "FAILED: $2"
    fi
}

# ---- roots --------------------------------------------------------------------------------------

make_base() {
    local mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        awk '$2 == "bookworm" { print $1; exit }')
    debootstrap --variant=minbase bookworm "$1" ${mirror:+"$mirror"} >"$1.log" 2>&1 ||
        { tail -n 20 "$1.log"; return 1; }
}

# A root of its own from the bare one, with this machine's way to its package mirror.
make_root() {
    cp -a "$work/base" "$1"
    apt-config dump Acquire >"$1/etc/apt/apt.conf.d/90machine"
    cp /etc/resolv.conf "$1/etc/resolv.conf"
    printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d" # start no services
    chmod 755 "$1/usr/sbin/policy-rc.d"
    mount_root "$1"
}

# /proc and a small /dev, for as long as this mount name space lives.
mount_root() {
    mount -t proc proc "$1/proc"
    mount -t tmpfs -o mode=755 tmpfs "$1/dev"
    mknod -m 666 "$1/dev/null" c 1 3
    mknod -m 666 "$1/dev/zero" c 1 5
    mknod -m 666 "$1/dev/full" c 1 7
    mknod -m 666 "$1/dev/random" c 1 8
    mknod -m 666 "$1/dev/urandom" c 1 9
    mknod -m 666 "$1/dev/tty" c 5 0
    ln -s /proc/self/fd "$1/dev/fd"
    ln -s /proc/self/fd/0 "$1/dev/stdin"
    mkdir "$1/dev/shm" "$1/dev/pts"
    mount -t tmpfs tmpfs "$1/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$1/dev/pts"
    ln -s pts/ptmx "$1/dev/ptmx"
}

# in_root ROOT FOLDER SCRIPT: the script's text in a login shell's environment.  `init` is the process of a
# booted systemd, in whose name spaces the script then runs.
init=
in_root() {
    local enter=(chroot "$1")
    [ -z "$init" ] || enter=(nsenter -t "$init" -m -u -i -n -p -C -r --wdns=/)
    timeout 3600 "${enter[@]}" /usr/bin/env -i HOME=/root TERM=dumb LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        bash -ec "cd '$2'"$'\n'"$3" </dev/null
}

# ---- blocks -------------------------------------------------------------------------------------

# The N-th ```sh block of a guide, or the one with the word N after it.
block() {
    awk -v want="$2" '
        /^```sh$/ { n++; inside = n == want; next }
        /^```/ { inside = $2 != "" && $2 == want; next }
        inside' "$top/$1"
}

# run_block GUIDE N [WORD]: runs it; its output must hold WORD.
run_block() {
    local text rc=0
    text=$(block "$1" "$2")
    [ "${NEWCOMER_CHECK:-1}" != 0 ] || text=$(grep -v '^make check' <<<"$text")
    say "$1, block $2"
    # shellcheck disable=SC2001
    sed 's/^/   $ /' <<<"$text"
    { time in_root "$work/one" /root/ds4 "$text" >"$work/out" 2>&1 || rc=$?; } 2>"$work/time"
    tail -n "${LINES_SHOWN:-12}" "$work/out" | cut -c 1-300
    cat "$work/time"
    if [ $rc = 0 ] && [ -n "${3:-}" ] && ! grep -q "$3" "$work/out"; then
        say "no \"$3\" in the output"
        rc=1
    fi
    verdict $rc "$1, block $2"
}

# ---- the story ----------------------------------------------------------------------------------

with_network() {
    if [ -n "${NEWCOMER_BASE:-}" ]; then
        cp -a "$NEWCOMER_BASE" "$work/base"
    else
        say "debootstrap"
        time make_base "$work/base" || exit 1
    fi
    make_root "$work/one"
    mkdir "$work/one/root/ds4"
    git -C "$top" ls-files -z | tar -C "$top" --null -T - -cf - | tar -C "$work/one/root/ds4" -xf -
    # The one file that comes from no Debian mirror: npm in the root may have no way to its registry.
    [ ! -e "$top/build/vocab/tokenizer.json" ] ||
        install -D -m 644 -t "$work/one/root/ds4/build/vocab" "$top/build/vocab/tokenizer.json"
    # What the README takes for granted: make, and what a machine that boots has.
    in_root "$work/one" / 'apt-get update -q && apt-get install -y -q --no-install-recommends make systemd' \
        >"$work/out" 2>&1 || { tail "$work/out"; exit 1; }
    run_block README.md 1 'exit 0'
    run_block README.md 3
    for n in 1 2 3 4; do
        run_block deploy/INSTALL.md $n
    done
    # The same build as a package, and another bare root for it.
    say "make deps-deb deb"
    { time in_root "$work/one" /root/ds4 'make deps-deb && make deb' >"$work/out" 2>&1; } 2>&1
    verdict $? "the package is made" || tail "$work/out"
    package
}

package() {
    local rc=0
    make_root "$work/two"
    cp "$work"/one/root/ds4/build/deb/ds4_*_amd64.deb "$work/two/root/" || return
    in_root "$work/two" /root '
        apt-get update -q
        apt-get install -y -q --no-install-recommends ./ds4_*_amd64.deb
        dpkg --verify ds4
        systemctl enable ds4.target ds4-router ds4-worker@0 ds4-worker@1
        printf "model { path = \"/x\" }\n" >/etc/ds4/ds4.conf
        ds4-router --check-config
        ds4-doctor --only programs
        test "$(stat -c %U:%a /run/ds4)" = ds4:700
        rm /etc/ds4/ds4.conf
        apt-get remove -y -q ds4
        test ! -e /usr/sbin/ds4-router
        apt-get purge -y -q ds4' >"$work/out" 2>&1 || rc=$?
    [ $rc = 0 ] || tail -n 20 "$work/out"
    verdict $rc "the package installs, runs, goes"
    find "$work/two" -xdev \( -path "$work/two/root" -o -path "$work/two/var/cache" \) -prune \
        -o -name '*ds4*' -print >"$work/left"
    cat "$work/left"
    [ ! -s "$work/left" ]
    verdict $? "nothing of it is left"
}

# In a network of its own: what is served here nobody else can meet, and port 8000 is free.
alone() {
    local demo
    ip link set lo up
    mount_root "$work/one"
    say "make demo SERVE=1, for the README's request"
    in_root "$work/one" /root/ds4 'make demo SERVE=1' >"$work/demo" 2>&1 &
    demo=$!
    timeout 120 bash -c 'until grep -q "serving on" "$0"; do sleep 0.2; done' "$work/demo"
    run_block README.md 2 'DONE'
    kill "$(pgrep -f deploy/demo.py)" # in this name space it is the only one
    wait $demo
}

# Without systemd: a stand-in of the same name, first in the path.
stand_in() {
    say "services by the stand-in for systemd"
    ip link set lo up
    mount_root "$work/one"
    install -D -m 755 "$top/tests/support/systemctl.py" "$work/one/usr/local/lib/ds4-stand-in/systemctl"
    install -m 644 "$top/tests/support/supervisor.py" "$work/one/usr/local/lib/ds4-stand-in/"
    ln -s /usr/local/lib/ds4-stand-in/systemctl "$work/one/usr/local/sbin/systemctl"
    daily
}

# Becomes the root's systemd.  Name spaces are new; what they do not cover of the kernel (settings, modules,
# clock, devices) is read-only or out of its capabilities.
boot() {
    local root=$work/one
    mount --make-rprivate /
    mount --bind "$root" "$root" # units get mount name spaces of their own, which takes a mount point
    mount_root "$root"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,bind,ro "$root/proc/sys"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup" || exit 1
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs tmpfs "$root/tmp"
    hostname newcomer
    ip link set lo up
    cd "$root" || exit 1
    exec env -i container=ds4 PATH=/usr/sbin:/usr/bin:/sbin:/bin setpriv \
        --bounding-set -sys_module,-sys_time,-sys_rawio,-sys_boot,-mknod,-syslog,-wake_alarm,-block_suspend \
        chroot "$root" /lib/systemd/systemd --system --unit=basic.target --show-status=0
}

# Sets `init`; fails where there is no cgroup2 to hand out, or systemd does not come up.
start_boot() {
    local n
    group=$(findmnt -n -o TARGET -t cgroup2 | head -n 1)/ds4-newcomer-$$
    mkdir "$group" 2>/dev/null || return 1
    (
        echo $BASHPID >"$group/cgroup.procs" &&
            exec unshare --fork --kill-child --pid --mount --uts --ipc --net --cgroup "$0" boot "$work"
    ) >"$work/boot.log" 2>&1 &
    booter=$!
    for n in $(seq 300); do
        init=$(pgrep -P $booter -x systemd || true)
        [ -z "$init" ] || ! in_root "$work/one" / 'systemctl is-active -q basic.target' 2>/dev/null || return 0
        kill -0 $booter 2>/dev/null || break
        sleep 0.2
    done
    init=
    return 1
}

end_boot() {
    kill -KILL "$init" # the first process of its name space: all others go with it
    wait "$booter" 2>/dev/null
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
}

booted() {
    start_boot || { cat "$work/boot.log"; exit 3; }
    trap end_boot EXIT
    say "services by systemd: $(in_root "$work/one" / 'systemctl --version | head -n 1')"
    daily
    in_root "$work/one" / 'ready() {
            for _ in $(seq 200); do ! curl -fs http://127.0.0.1:8000/health >/dev/null || return 0; sleep 0.2; done
            return 1
        }
        pid() { systemctl show -p MainPID --value "$1"; }
        rm -r /etc/systemd/system/ds4-router.socket.d
        sed -i "/^http/d" /etc/ds4/ds4.conf
        systemctl daemon-reload
        systemctl start --no-block ds4.target
        ready
        echo "a stage killed"
        stage=$(pid ds4-worker@1)
        kill -9 "$stage"
        while curl -fs http://127.0.0.1:8000/health >/dev/null; do sleep 0.1; done
        ready
        test "$(pid ds4-worker@1)" != "$stage"
        echo "the router frozen"
        router=$(pid ds4-router) stage=$(pid ds4-worker@1)
        kill -STOP "$router"
        for _ in $(seq 60); do
            sleep 1
            now=$(pid ds4-router)
            test "$now" = "$router" || test "$now" = 0 || break
        done
        test "$(pid ds4-router)" != "$router"
        test "$(pid ds4-worker@1)" = "$stage"
        ready
        systemctl reload ds4-router
        echo "everything stopped under a stream"
        curl -sN http://127.0.0.1:8000/v1/chat/completions -H "content-type: application/json" -d "{\"stream\": true,
            \"max_tokens\": 300, \"min_tokens\": 300, \"messages\": [{\"role\": \"user\", \"content\": \"A story.\"}]}" \
            >/tmp/stream & stream=$!
        for _ in $(seq 100); do test ! -s /tmp/stream || break; sleep 0.1; done
        systemctl stop ds4.target ds4-router "ds4-worker@*"
        wait "$stream"
        tail -n 2 /tmp/stream | grep -F "[DONE]"
        ! grep -F "\"error\"" /tmp/stream
        for unit in ds4-router ds4-worker@0 ds4-worker@1; do
            test "$(systemctl show -p Result -p ExecMainStatus --value $unit | paste -s -d " ")" = "success 0"
        done
        echo "settings that are wrong"
        sed -i s/tiny.gguf/none.gguf/ /etc/ds4/ds4.conf
        ! systemctl start ds4-worker@0
        test "$(systemctl show -p NRestarts -p ExecMainStatus --value ds4-worker@0 | paste -s -d " ")" = "0 78"' \
        >"$work/out" 2>&1
    verdict $? "systemd: a stage killed, the router frozen, all stopped under a stream, wrong settings"
    grep -v '^data' "$work/out" | tail -n 12
}

# From the first start on.
daily() {
    run_block deploy/INSTALL.md 5
    run_block deploy/INSTALL.md 6 '85'
    run_block deploy/INSTALL.md 7 'fits: cluster.partition'
    run_block deploy/INSTALL.md later
    in_root "$work/one" / '
        key=$(cat /etc/ds4/keys)
        for _ in $(seq 100); do
            ! curl -fs -H "x-api-key: $key" http://127.0.0.1:8000/v1/models || break
            sleep 0.2
        done
        curl -fs -H "x-api-key: $key" http://127.0.0.1:8000/v1/models >/dev/null
        test "$(curl -s -o /dev/null -w %{http_code} http://127.0.0.1:8000/v1/models)" = 401'
    verdict $? "keys are asked for after part 7"
    in_root "$work/one" / '
        systemctl stop ds4.target ds4-router ds4-worker@0 ds4-worker@1
        ! systemctl is-active ds4-router ds4-worker@0'
    verdict $? "everything stops"
}

case ${1:-} in
boot)
    work=$2
    boot
    ;;
with_network | alone | booted | stand_in)
    work=$2
    "$1"
    echo "$passed $failed" >"$work/count.$1"
    exit 0
    ;;
esac
for tool in debootstrap unshare ip; do
    command -v $tool >/dev/null || { echo "$tool is missing: make check-newcomer installs it" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "a root for chroot takes root" >&2; exit 1; }
work=$(mktemp -d /var/tmp/ds4-newcomer.XXXXXX)
[ -n "${NEWCOMER_KEEP:-}" ] || trap 'rm -rf --one-file-system "$work"' EXIT
export NEWCOMER_BASE NEWCOMER_CHECK
unshare --mount --mount-proc --pid --fork --kill-child "$0" with_network "$work"
unshare --mount --mount-proc --pid --fork --kill-child --net "$0" alone "$work"
"$0" booted "$work" ||
    unshare --mount --mount-proc --pid --fork --kill-child --net "$0" stand_in "$work"
cat "$work"/count.* | awk '{ p += $1; f += $2 } END { print p " passed, " f + 0 " failed"; exit f > 0 || NR != 3 }'
