"""Replaces functions of a Cython module, for Python and for the C code of modules that import them
later; this C code finds them in capsules with their signatures (`__pyx_capi__`)."""

import ctypes
import os
import re
import traceback

from tests.simulated_cuda.device import WRONG

GET_NAME, NEW = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_New
GET_NAME.restype, GET_NAME.argtypes = ctypes.c_char_p, [ctypes.py_object]
NEW.restype = ctypes.py_object
NEW.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
TYPES = {
    "PyObject *": ctypes.py_object,
    "intptr_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "float": ctypes.c_float,
}
SKIP = "__pyx_skip_dispatch"  # from here on, parameters are Cython's own


def replace(module, functions):
    """Replace the functions of a module by those with the same names in the dict."""
    for name, function in functions.items():
        setattr(module, name, function)
        if name in module.__pyx_capi__:
            signature = GET_NAME(module.__pyx_capi__[name])
            pointer = in_c(function, signature.decode())
            for each in (pointer, signature):  # CuPy calls them until the very end
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
            address = ctypes.cast(pointer, ctypes.c_void_p).value
            module.__pyx_capi__[name] = NEW(address, signature, None)


def in_c(function, signature):
    """Return a C function of this signature that calls `function` without Cython's parameters."""
    result, listed = re.fullmatch(r"(.*?) ?\((.*)\)", signature).groups()
    words = [word.strip() for word in listed.split(",") if word != "void"]
    count = next((n for n, word in enumerate(words) if SKIP in word), len(words))

    def call(*arguments):
        try:
            return function(*arguments[:count])
        except BaseException:  # nothing can be raised through C
            traceback.print_exc()
            traceback.print_stack()
            os._exit(WRONG)

    kinds = [type_of(word.replace(SKIP, "").strip()) for word in words]
    return ctypes.PYFUNCTYPE(TYPES[result], *kinds)(call)


def type_of(word):
    return ctypes.c_void_p if word.startswith("struct") else TYPES[word]
