# SPDX-License-Identifier: BSD-3-Clause
"""What the ib_* programs share.

options    command line, with perftest's names
verbs      the measured package (pyverbs or shiftverbs), chosen at run time, and one RC endpoint made with it
exchange   the TCP connection over which the two sides find each other
report     perftest's header lines, columns and statistics
bandwidth  the ib_*_bw programs
latency    the ib_*_lat programs
"""
