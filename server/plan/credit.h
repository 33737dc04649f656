// How many bytes of gradients a rank may have under way, which is its window of the plan: a sixteenth of a step's
// gradients, at least kLeastCredit and one chunk, and at most what the daemon's configuration allows
// (limits.credit_bytes). What is under way need only last from a chunk's departure to its sum, which is no matter of the
// model's size; kLeastCredit is what 10 Gbit/s carry in 3 ms. A client keeps what finds no credit, so that backward need
// not wait for any; and no step waits for ever with little (step/reduction_tracker.h).
//
// A rank that holds a shard of the model sends less than all gradients, and its credit is a larger share of that: which
// shards there are is known when ranks attach, after the plan is made.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>

#include "server/spec/run_spec.h"

namespace ballast {

inline constexpr uint64_t kCreditShare = 16, kLeastCredit = uint64_t{4} << 20;

// Of the spec's tensors and chunk_elements alone. limit_bytes: at least 1.
uint64_t CreditBytes(const RunSpec& spec, uint64_t limit_bytes);

}  // namespace ballast
