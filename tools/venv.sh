# Sourced by tools/demo and tools/test: sets root and python, and offers install.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python="$root/.venv/bin/python"

# install EXTRA: make .venv if need be and install the checkout with the extra, again only if pyproject.toml
# changed or the checkout moved. Editable, so that what runs is what lies here.
install() {
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "cupaged needs Python 3.10 or newer as python3" >&2
        exit 1
    fi
    if [ ! -x "$python" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
        python3 -m venv --clear "$root/.venv" || {
            echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2
            exit 1
        }
    fi
    stamp="$root/.venv/installed-$1"
    key="$root $(cksum <"$root/pyproject.toml")"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$key" ]; then
        echo "Installing cupaged[$1] into $root/.venv ..." >&2
        "$python" -m pip install -qq --disable-pip-version-check -e "$root[$1]"
        printf '%s\n' "$key" >"$stamp"
    fi
}
