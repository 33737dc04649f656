// How a run's status reads, in the tables of `runs` and `run`.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/v1/run.pb.h"

namespace ballast::ctl {

std::string StateText(const v1::RunStatus& run);       // training; idle for 3 h 2 min
std::string AwaitedText(const v1::AwaitedRank& rank);  // rank 1, which has not begun it, for 12 s
// 3 readers; version of step 120, 42.1 MiB; it has changed 1.1 %, 480 KiB
std::string FollowText(const v1::FollowStatus& follow);
// node7:7700, for 3 min; the weights here are 2 s old; 1.20 GiB received
std::string RelayText(const v1::RelayStatus& relay);
// step 120, 1.20 GiB, written 3 min 5 s ago
std::string DurabilityText(const v1::DurabilityStatus& durability);
// What keeps the run from going on, or from the disk, and why; empty: nothing.
std::string MatterText(const v1::RunStatus& run);
std::string OutcomeName(v1::StepOutcome outcome);   // applied
uint64_t StoredBytes(const v1::ByteCounts& bytes);  // what lasts from step to step: weights and state
uint64_t TotalBytes(const v1::ByteCounts& bytes);

}  // namespace ballast::ctl
