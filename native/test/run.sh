#!/bin/sh
# Builds every native/test/test_*.cc with all sources of the core and runs them: one program a file.
#
#   native/test/run.sh [plain|asan|tsan|bench]...      default: plain
#
# plain: optimised, as shipped. asan: address and undefined-behaviour sanitizers. tsan: thread
# sanitizer. bench: native/bench/bench_*.cc instead, optimised. Each program has TEST_SECONDS
# (default 60) and must exit with 0. CXX is honoured.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cxx=${CXX:-g++}
seconds=${TEST_SECONDS:-60}
common="-std=c++20 -g -pthread -Wall -Wextra -Wshadow -Werror"
common="$common -I$root/native -I$root/native/include -I$root/native/src"

flags_of() {
    case $1 in
    plain | bench) echo "-O3" ;;
    asan) echo "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
    tsan) echo "-O1 -fno-omit-frame-pointer -fsanitize=thread" ;;
    *) echo "run.sh: unknown mode $1" >&2; return 1 ;;
    esac
}

# The thread sanitizer of older compilers cannot live with much address randomisation.
still() {
    if [ "$1" = tsan ] && command -v setarch >/dev/null; then shift; setarch -R "$@"; else shift; "$@"; fi
}

# Objects are rebuilt when their source, any header, or this script is newer.
compile() {
    mode=$1 work=$2 flags=$3
    newest=$(find "$root/native" -name '*.h' -newer "$work/.built" 2>/dev/null | head -n 1)
    [ -e "$work/.built" ] && [ -z "$newest" ] && [ ! "$0" -nt "$work/.built" ] || rm -f "$work"/*.o
    touch "$work/.building"
    find "$root/native/src" "$root/native/$kind" -name '*.cc' | sort | while read -r source; do
        object=$work/$(echo "${source#"$root"/native/}" | tr / .).o
        [ "$object" -nt "$source" ] || printf '%s\n%s\n' "$source" "$object"
    done | xargs -r -P 2 -n 2 sh -c "$cxx $common $flags -c \"\$0\" -o \"\$1\""
    mv "$work/.building" "$work/.built"
}

for mode in "${@:-plain}"; do
    flags=$(flags_of "$mode")
    kind=test
    [ "$mode" != bench ] || kind=bench
    work=$root/build/native-test/$mode
    mkdir -p "$work"
    compile "$mode" "$work" "$flags"
    for test in "$root/native/$kind/${kind}"_*.cc; do
        name=$(basename "$test" .cc)
        # shellcheck disable=SC2086 - flags are words
        $cxx $common $flags "$work/$kind.$name.cc.o" "$work"/src.*.o -ldl -o "$work/$name"
        echo "$mode $name"
        still "$mode" timeout "$seconds" "$work/$name" || {
            status=$?
            [ $status -ne 124 ] || echo "run.sh: $name did not end within $seconds s" >&2
            echo "run.sh: $mode $name failed ($status)" >&2
            exit 1
        }
    done
done
