#!/usr/bin/env bash
# From `mla new` to a green conformance run, away from this repository: a stranger's plugin and the project's own
# distributions are built as wheels and installed into a fresh environment, and the suite runs there.
#
#   scripts/third_party.sh [FOLDER]      default: a temporary one; PYTHON chooses the interpreter
#
# torch and other dependencies are taken from the interpreter's own environment: they are gigabytes, and nothing
# about them is in question here.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${PYTHON:-python3}")
work=${1:-$(mktemp -d)}
mkdir -p "$work"
cd "$work"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONPATH

say() { printf '\n$ %s\n' "$*"; "$@"; }
wheel() { "$python" -m pip wheel -q --no-index --no-deps --no-build-isolation --wheel-dir wheels "$1"; }

say "$(dirname "$python")/mla" new outside_one
say "$(dirname "$python")/mla" new outside_two
printf '\nbuilding wheels\n'
for folder in "$root" "$root/plugins/vanilla" ./mla-outside-one ./mla-outside-two; do wheel "$folder"; done
ls wheels

printf '\na fresh environment\n'
"$python" -m venv --without-pip fresh
site=$(fresh/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/outer.pth"
"$python" -m pip --python fresh/bin/python install -q --no-deps --no-index wheels/*.whl
fresh/bin/python -c 'import mla_core, mla_outside_one; print(mla_core.__file__, mla_outside_one.__file__, sep="\n")'

say fresh/bin/mla list
say fresh/bin/mla explain deepseek-v3 --backend 'prefill=vanilla;decode=outside_one|outside_two'
say fresh/bin/mla conformance outside_one
say fresh/bin/mla conformance outside_two --quick
mkdir -p evidence
cd mla-outside-one
say ../fresh/bin/python -m pytest -q -p no:cacheprovider --mla-report ../evidence/outside_one.json
