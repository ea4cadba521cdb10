"""Import this last in a server that forks: a fork's garbage collector then leaves alone what was there before.

Without it, the first collection in each fork copies every page that holds a Python object.
"""

import gc

gc.collect()
gc.freeze()
