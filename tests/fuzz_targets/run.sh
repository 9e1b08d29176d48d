#!/bin/sh
# Fuzzes each target for some seconds: run.sh SECONDS FOLDER [TARGET...]
# Starts from the committed corpora, the tests' files and what an earlier run left in FOLDER. Afterwards FOLDER/findings
# holds the inputs that broke a target, FOLDER/minimal the smallest corpora with the same coverage (corpus.py pack takes
# them). Needs clang with libFuzzer (Debian: clang libclang-rt-dev), and a Python with safeload[test] and atheris.
set -eu
seconds=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
shift 2
[ $# -gt 0 ] || set -- json safetensors gguf any torch pickle moon npz npy gguf_values quantized grouping adapters index gguf_split config url
python "$here/corpus.py" unpack "$folder/corpus"
python "$here/corpus.py" seeds "$folder/seeds"
"$here/build.sh" fuzz "$folder/build"

failed=
for target in "$@"; do
    case $target in
    json | safetensors | gguf) program=$folder/build/$target ;;
    *) program="python $here/fuzz_python.py $target" ;;
    esac
    case $target in
    gguf*) words=gguf ;;
    torch | pickle) words=torch ;;
    any | moon | npz | npy | url) words= ;;
    *) words=json ;;
    esac
    corpora="$folder/corpus/$target $folder/seeds/$target"
    mkdir -p "$folder/findings/$target" "$folder/minimal/$target"
    # Limits of one input: 20 seconds, 3 GiB.
    # shellcheck disable=SC2086
    $program -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=3072 -print_final_stats=1 \
        ${words:+-dict=$here/$words.dict} -artifact_prefix="$folder/findings/$target/" $corpora \
        >"$folder/$target.log" 2>&1 || failed="$failed $target"
    # shellcheck disable=SC2086
    $program -merge=1 -max_len=4096 "$folder/minimal/$target" $corpora >"$folder/$target.merge.log" 2>&1 || :
    echo "$target: $(grep -a 'DONE\|^SUMMARY' "$folder/$target.log" | tail -n 1)"
done
[ -z "$failed" ] || {
    echo "found something, see $folder/findings:$failed"
    exit 1
}
