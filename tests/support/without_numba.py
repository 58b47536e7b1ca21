"""A pytest plugin (`-p tests.support.without_numba`): the tests as they run where the
extra `fast` is not installed.
"""

import sys

assert "numba" not in sys.modules
# An entry of None makes every `import numba` raise ImportError, as on a machine that
# lacks it.
sys.modules["numba"] = None
