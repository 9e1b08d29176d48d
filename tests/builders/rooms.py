"""The room after the header of a safetensors file."""


def without_room(path):
    """The bytes of a file with its header padded as upstream pads it."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip(b" ")
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]
