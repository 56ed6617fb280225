"""Chapter 12. Serialization of a function's inputs and results as JSON, which is compared and never unpickled.

    None, bool, int, float, str     themselves; an int beyond 64 bits as ["int", "0x..."], nan and the infinities as ["float", "nan"]
    list, tuple, bytes              ["list", ...], ["tuple", ...], ["bytes", "hexadecimal"]
    set, frozenset, dict            ["set", ...], ["dict", [key, value], ...], sorted by their JSON

A result comes from a stranger. So it stays in this form: nothing is built from it, hashed or called, and its keys collide with nothing.
Subclasses are refused, for their `__eq__` is the stranger's too.
"""

import json
import math
from typing import Any

CLOSE = 1e-9  # relative, where a float is expected


def encode(value: Any) -> Any:
    """A value in the form above.

    Raises:
        TypeError: a type that has no form, such as a generator, a function or a subclass of str.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else ["int", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if kind in (list, tuple):
        return [kind.__name__, *map(encode, value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (set, frozenset):
        return ["set", *sorted(map(encode, value), key=json.dumps)]
    if kind is dict:
        return ["dict", *sorted(([encode(key), encode(item)] for key, item in value.items()), key=json.dumps)]
    raise TypeError(f"a {kind.__name__} has no form in JSON")


def decode(form: Any) -> Any:
    """The value of a form that `encode` made: for the inputs alone, which are the trainer's."""
    if type(form) is not list:
        return form
    kind, items = form[0], form[1:]
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[kind](map(decode, items))
    return {"int": lambda text: int(text, 16), "float": float, "bytes": bytes.fromhex}[kind](items[0])


def same(expected: Any, found: Any) -> bool:
    """Whether a result's form is the expected one. As in Python, 3 equals 3.0, and a list equals no tuple; but True does not equal 1.

    Where a float is expected, a relative error of 1e-9 is let pass. A nan equals a nan.
    """
    if type(expected) is list:
        return type(found) is list and len(expected) == len(found) and all(map(same, expected, found))
    if type(expected) in (int, float) and type(found) in (int, float):
        try:
            return expected == found or (type(expected) is float and math.isclose(expected, found, rel_tol=CLOSE))
        except OverflowError:  # an int beyond the floats
            return False
    return type(expected) is type(found) and expected == found
