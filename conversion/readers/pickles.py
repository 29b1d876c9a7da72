"""What the pickle of a PyTorch file may do before `torch.load` sees it: little, as it can make gigabytes of some bytes.

`torch.load(weights_only=True)` runs no code of the file, but calls `bytearray`, `set` or `OrderedDict` with whatever
the pickle says, as often as it says. A state dict needs some 30 opcodes a tensor, and no copy of anything.
"""

import pickletools

MAX_OPCODES = 250_000  # each may make an object of 200 bytes
MAX_BUILDS = 16  # an OrderedDict with attributes, a namespace of options: one a model
_GREEDY = ("bytearray", "encode")  # fill memory with one call, and make no tensor
_COPYING = ("OrderedDict", "Counter", "Size", "set")


def refuse_hungry(data: bytes) -> None:
    """Raise a ValueError for a pickle that would fill the memory, or is none.

    Raises:
        ValueError: it has countless opcodes, or calls what allocates, or what copies with something made before.
    """
    called: dict[int, str] = {}  # place in the memo -> callable
    last, open_call, builds = "", "", 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if number == MAX_OPCODES:
            raise ValueError(f"its pickle has more than {MAX_OPCODES} opcodes")
        if open_call and name in ("BINGET", "LONG_BINGET", "GLOBAL", "BINPERSID"):
            raise ValueError(f"its pickle copies into {open_call}")
        if name in ("BINPUT", "LONG_BINPUT"):
            called[int(argument or 0)] = last
            continue
        last = ""
        if name == "GLOBAL":
            last = str(argument).rpartition(" ")[2]
        elif name in ("BINGET", "LONG_BINGET"):
            last = called.get(int(argument or 0), "")
        elif name in ("REDUCE", "NEWOBJ"):
            open_call = ""
        elif name == "BUILD":
            builds += 1
        if last in _GREEDY or builds > MAX_BUILDS:
            raise ValueError(f"its pickle calls {last or 'BUILD'} for what is no tensor")
        open_call = last if last in _COPYING else open_call
