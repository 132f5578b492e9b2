#!/bin/sh
# Builds every native/test/test_*.cc with all sources of the core and runs them: one program a file.
#
#   native/test/run.sh [plain|asan|tsan|bench|fuzz]...      default: plain
#
# plain: optimised, as shipped. asan: address and undefined-behaviour sanitizers. tsan: thread
# sanitizer. bench: native/bench/bench_*.cc instead, optimised. Each program has TEST_SECONDS
# (default 60) and must exit with 0. CXX is honoured.
# fuzz: libFuzzer on the frame decoder for FUZZ_SECONDS (default 10), with the address sanitizer; needs
# clang++ (or CLANGXX). What it found stays in build/native-test/fuzz/corpus for the next time.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cxx=${CXX:-g++}
seconds=${TEST_SECONDS:-60}
common="-std=c++20 -g1 -pthread -Wall -Wextra -Wshadow -Werror"
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

fuzz() {
    clang=${CLANGXX:-$(command -v clang++ || command -v clang++-14 || command -v clang++-15)} || {
        echo "run.sh: fuzz needs clang++" >&2
        return 1
    }
    work=$root/build/native-test/fuzz
    mkdir -p "$work/corpus"
    flags="-std=c++20 -g -O1 -pthread -DMC_LIBFUZZER -fsanitize=fuzzer,address"
    flags="$flags -I$root/native -I$root/native/include -I$root/native/src"
    no_main=$(echo "$flags" | sed 's/fuzzer,/fuzzer-no-link,/')
    for source in $(find "$root/native/src/base" "$root/native/src/memory" "$root/native/src/transport" \
        -name '*.cc' ! -path '*/rdma/*') "$root/native/test/test_frames.cc"; do
        case $source in  # the checksums are no decoder, and their pragmas are g++'s
        */memory/*) with="$cxx $common -O2" ;;
        *) with="$clang $no_main" ;;
        esac
        echo "$with -c $source -o $work/$(echo "${source#"$root"/native/}" | tr / .).o"
    done | xargs -r -P 2 -d '\n' -n 1 sh -c
    # shellcheck disable=SC2086 - flags are words
    "$clang" $flags "$work"/*.o -ldl -o "$work/fuzz_frames"
    FUZZ_CORPUS=$work/corpus "$work/fuzz_frames" -max_total_time="${FUZZ_SECONDS:-10}" -timeout=25 \
        -max_len=200000 -print_final_stats=1 -artifact_prefix="$work/" "$work/corpus"
}

for mode in "${@:-plain}"; do
    if [ "$mode" = fuzz ]; then
        fuzz
        continue
    fi
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
