# SPDX-License-Identifier: BSD-3-Clause
"""The main job, shown and checked: RDMA traffic that survives a NIC, from one command.

  options.py      the command line's arguments
  main.py         the whole run: etcd, hosts, scenarios, report
  etcd_server.py  a private etcd for the run
  network.py      a private software network and its faults
  host.py         one host: a child process that runs workload.py, and its conversation with us
  scenario.py     one kind of traffic under one fault, with shiftverbs or with plain pyverbs
  story.py        one cable, before and after: what is told first
  report.py       the live view, the table, the JSON file
in the child, an ordinary verbs program (works with either package):
  workload.py     the program: commands in, reports out, the loop
  endpoint.py     verbs objects of one RC connection
  traffic.py      write_imm, send, read
  pattern.py      what every byte of message n must be, and which are missing, double, late or damaged
"""
