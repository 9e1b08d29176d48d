"""Messages of the Python API in the words of the command line: options instead of arguments."""

from __future__ import annotations

import re

# Arguments in advice, such as `dtype="float32"`, `overwrite=True` and `max_shard_size=`.
_ARGUMENT = r"""(?<![^ (])
    (base|dtype|drop|force|format|ignore|imatrix|keep|layout|max_shard_size|metadata|only|overwrite|quantize|raw|rename
     |resume|root|stored|unknown_globals|verify)
    (?:=(?: True\b | "(\w+)" | (?<=format=)'(\w+)' | (?<=(?:only|drop|keep|root)=)(?=') | (?<=ignore=)(?=')
       | (?<=quantize=)(?=')
       | (?=[ ,;:.)]|$) )
       | (?<=max_shard_size)(?=[ ]|$))"""

_QUOTED = r"""["']([^"']*)["']"""
_CACHE = "--storage-option filecache.cache_storage=FOLDER"

# Other Python in advice. `re` compiles the patterns when the first message has some, because few runs print one.
_CODE = (
    (r"storage_options= \(which may be empty\)", "--storage-option KEY=VALUE"),
    (r"pass storage_options= or", "pass --storage-option KEY=VALUE or"),
    (r"storage_options=\{'headers': \{'Authorization': \.\.\.\}\}", "--storage-option headers.Authorization=..."),
    (r"storage_options=\{'verify': PATH\}", "--storage-option verify=PATH"),
    (r"check_files=True", "--storage-option filecache.check_files=true"),
    (r'safeload\.open\("(filecache::[^"]*)", storage_options=\{\}\) keeps', rf"\1 with {_CACHE} keeps"),
    (r"(filecache::URL) with storage_options=\{\}", rf"\1 with {_CACHE}"),
    (rf"safeload\.load\({_QUOTED}(?:, storage_options=\{{\}})?\) reads it over the network", r"pass \1"),
    (rf"safeload\.open\({_QUOTED}\)", r"\1"),
    (r"names are exact; only= of safeload\.load takes patterns", "names are exact"),
    (r", or open several together with safeload\.open\(\[.*\]\)", ""),
    (r"patterns are not expanded: pass safeload\.open a list such as \S+", "pass the matching files"),
    (r"; for a bucket pass safeload\.remote\.\S+ path\)", ""),
    (r"safeload\.load without dtype= returns them", "--stored shows them"),
    (r"safeload\.load of the whole checkpoint .* with stored=True", "--stored shows the codes as stored"),
    (r'see safeload\.load_quantized, or pass quantize="(\S*)" to safeload\.convert', r"pass --quantize \1 to convert"),
    (r"safeload\.convert can merge", "`safeload convert` can merge"),
    (r"safeload\.convert\(\.\.\., URL\) writes", "`safeload convert SOURCE URL` writes"),
    (r"Convert the tensor with safeload\.astype, or leave it out(?: with drop=)?", "Leave it out with --drop"),
    (r"\bscheme=\{('[^']*)': None\}", r"--quantize \1=none'"),
    (r"no pattern of scheme= matches", "no pattern of --quantize matches"),
    (r"\bscheme=", "--quantize "),
    (r"\bexecutor=", "--dask"),
    (r"\badapters=", "--adapter"),
    (r"or a dict with a scheme for each name pattern", "or --quantize PATTERN=SCHEME for each kind of matrix"),
    (r"pass check=False", "pass --no-check"),
    (r"pass safeload\.Signature\(path, key=\.\.\.\)", "pass --key or --certificate"),
)


def _option(argument: re.Match[str]) -> str:
    option = f"--{argument[1].replace('_', '-')}"
    value = argument[2] or argument[3]
    if value is not None:
        return f"{option} {value}"
    return f"{option} " if argument.string.startswith("'", argument.end()) else option


def in_options(text: str) -> str:
    """Return a message with options instead of Python arguments and calls."""
    if not any(mark in text for mark in ("=", "safeload.", "max_shard_size", "or a dict")):
        return text
    for pattern, replacement in _CODE:
        text = re.sub(pattern, replacement, text)
    return re.sub(_ARGUMENT, _option, text, flags=re.VERBOSE)
