# SPDX-License-Identifier: BSD-3-Clause
"""What performs the protocol: the one driver of a process, a connection per protected QP.

Here alone is acted, and the clock read.

`runtime` is the door: the machinery of this process, from its first Context to its end.
"""
