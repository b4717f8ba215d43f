/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The rails' fabric as all processes share it: what fabric/port.h computes, in the registry's file. A port has a lock of
 * its own, for no longer than that takes. What is asked here concerns a device whose fault_filter() says FAULT_CARRY.
 */
#ifndef SOFTRNIC_RAILS_H
#define SOFTRNIC_RAILS_H

#include "fabric/port.h"
#include "faults/fault.h"

/* Has any port of the device's rail limits? */
bool rails_limited(const struct fault_port *port);

/* What this host's port is like now; rate 0 = it has no limits. */
struct fabric_params rails_params(const struct fault_port *port);

/* The host's NIC counts one more. */
void rails_count(const struct fault_port *port, enum dcqcn_counter counter);

/* When the last bit of a packet of len bytes of UDP payload, sent now by this device's host, is in the switch. */
uint64_t rails_send(const struct fault_port *port, uint64_t now_ns, size_t len);

/* It is there, on its way to this address; ect: ECN may mark it. fate.out_ns is when it arrives there. */
struct fabric_fate rails_forward(const struct fault_port *port, uint32_t peer_ip, uint64_t now_ns, size_t len,
                                 bool ect);

#endif
