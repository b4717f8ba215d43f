# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks`: pyverbs and shiftverbs side by side, targets, figures.

cli           the command line, the order of things, what is printed and written
lab           the network, etcd and child processes of one run; what machine it is
rows          one line of the table; medians, spread, ratios of pairs
programs      parent's side of the rows that come from perftest's programs, and of the verbs' costs
start         parent's side of the rows about a program's start
recovery      parent's side of the rows about failures, and of the traffic through a failure
figures       the papers' figures
allreduce     `benchmarks/allreduce.py`: torch's allreduce beside gloo and ib_write_bw -b
tensors       `benchmarks/tensors.py`: pulls of tensors beside gRPC
Child processes, each `python -m benchmarks.suite.NAME`, told what to do on standard input:
verbs_cost    what each verb costs, on the null device
perf_host     one side of a perftest program, in short slices
start_host    one process from its import to a QP that is protected
failure_host  one host whose NIC fails, with one QP or a thousand
udp_host      one side of a plain UDP transfer, by udp.c
slow_commands what control verbs cost on NICs that take their time
allreduce_host  one rank of an allreduce
tensors_host  who has tensors, or pulls them
"""
