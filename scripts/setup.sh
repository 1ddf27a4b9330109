#!/usr/bin/env bash
# Brings a fresh Debian machine to where `make run`, `make test` or `make bench` works, and is silent where it is there already.
#
#   scripts/setup.sh run|test|bench
#
# Three steps, each skipped when its result is there: distribution packages, .venv, the native binary. What they print goes to
# build/setup.log and is shown only if a step fails.
set -euo pipefail
cd "$(dirname "$0")/.."

goal=${1:-run}
case $goal in
run) groups="run" ;;
test) groups="run test" ;;
bench) groups="run test bench" ;;
*)
    echo "setup: unknown goal '$goal'; one of run, test, bench" >&2
    exit 2
    ;;
esac

mkdir -p build
log=build/setup.log
# Two make commands at once must not install side by side.
exec 9>build/setup.lock
flock 9
: >"$log"

# step NAME COMMAND...: one line that says what is done and how long it took; the log's end if it fails.
step() {
    local name=$1 start=$SECONDS status=0
    shift
    printf 'setup: %s ... ' "$name"
    "$@" >>"$log" 2>&1 </dev/null || status=$?
    if [ "$status" -ne 0 ]; then
        printf 'failed\n'
        tail -n 40 "$log" >&2
        echo "setup: '$name' failed; the whole output is in $PWD/$log" >&2
        exit 1
    fi
    printf 'done in %d s\n' $((SECONDS - start))
}

wanted_packages() {
    local group package _
    while read -r group package _; do
        [[ " $groups " == *" $group "* ]] && echo "$package"
    done < <(grep -v '^#' scripts/packages.txt)
    return 0
}

missing_packages() {
    local package
    for package in $(wanted_packages); do
        case "$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null)" in
        ii*) ;;
        *) echo "$package" ;;
        esac
    done
}

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    local failed=0
    apt-get update -qq || return 1
    # Services that a package brings (docker) are ours to start, in a place of our own: a policy of 101 keeps them down.
    local policy=/usr/sbin/policy-rc.d placed=0
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
        placed=1
    fi
    apt-get install -y -qq --no-install-recommends "$@" || failed=1
    [ $placed -eq 1 ] && rm -f $policy
    return $failed
}

if command -v dpkg-query >/dev/null; then
    missing=$(missing_packages | xargs)
    if [ -n "$missing" ]; then
        if [ "$(id -u)" -ne 0 ]; then
            echo "setup: these packages are missing and only root can install them: apt-get install $missing" >&2
            exit 1
        fi
        # shellcheck disable=SC2086
        step "distribution packages ($missing)" install_packages $missing
    fi
else
    for tool in cc make git mkfs.btrfs; do
        command -v $tool >/dev/null || lacking="${lacking:-} $tool"
    done
    if [ -n "${lacking:-}" ]; then
        echo "setup: not a Debian system, so install by hand:$lacking (scripts/packages.txt says what each is for)" >&2
        exit 1
    fi
fi

# The first Python of 3.11 or later that can make a virtual environment. The distribution's comes before what else is on the PATH: it is
# built with profile-guided optimisation, and one built by hand without it takes a third longer for everything that edge does.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    echo "setup: no Python of 3.11 or later with the venv module; on Debian: apt-get install python3-venv" >&2
    return 1
}

python=$(find_python)
stamp=.venv/setup-stamp
key=$({ cat pyproject.toml hatch_build.py && "$python" -VV && command -v "$python" && pwd; } | sha256sum | cut -d ' ' -f 1)

install_python_packages() {
    if [ "$(readlink -f .venv/bin/python)" != "$(readlink -f "$(command -v "$python")")" ] || ! .venv/bin/python -m pip --version; then
        rm -rf .venv
        "$python" -m venv .venv
    fi
    # The group is read here because the pip of Debian 12 has no --group yet.
    .venv/bin/python - >build/dev-requirements.txt <<'PY'
import pathlib, tomllib
print(*tomllib.loads(pathlib.Path("pyproject.toml").read_text())["dependency-groups"]["dev"], sep="\n")
PY
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off -e . -r build/dev-requirements.txt
    .venv/bin/python -c 'import dsec, libdsec'
    echo "$key" >$stamp
}

if [ "$(cat $stamp 2>/dev/null)" != "$key" ]; then
    step "Python packages in .venv" install_python_packages
fi

# make itself knows whether anything changed; the line is printed only when something did.
if ! make -q -C native all >/dev/null 2>&1 || [ ! -x src/dsec/_native/dsec-native ]; then
    step "native binary" make -C native all
fi
