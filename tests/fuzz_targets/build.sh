#!/bin/sh
# Builds the targets in C: build.sh fuzz|replay FOLDER gives FOLDER/json, FOLDER/safetensors and FOLDER/gguf.
# fuzz: with clang's libFuzzer. replay: with any compiler ($CC, gcc unless set) and replay.c. $SANITIZE: flags.
set -eu
kind=$1 folder=$2
here=$(dirname "$0")
# -g1: reports name lines; what else -g writes takes GCC three times as long.
flags="-std=c11 -Og -g1 -fno-omit-frame-pointer -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I$here/../../csrc"
if [ "$kind" = fuzz ]; then
    CC=${CC:-clang}
    flags="$flags -O2 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
    main=
else
    CC=${CC:-gcc}
    flags="$flags ${SANITIZE:--fsanitize=address,undefined -fno-sanitize-recover=all}"
    main=$here/replay.c
fi
mkdir -p "$folder/objects"
# shellcheck disable=SC2086
for source in "$here"/../../csrc/*.c "$here"/../../csrc/*/*.c "$here/property.c" $main; do
    $CC $flags -c "$source" -o "$folder/objects/$(basename "$source" .c).o"
done
for target in json safetensors gguf; do
    # shellcheck disable=SC2086
    $CC $flags "$here/fuzz_$target.c" "$folder"/objects/*.o -lpthread -o "$folder/$target"
done
