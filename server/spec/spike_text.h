// What a detector found, in a sentence for people: warnings, the log, the page. Pure; thread-safe.
#pragma once

#include <string>

#include "server/spec/run_spec.h"

namespace ballast {

// "RMS_t of layers.3 (tensor 'layers.3.w') is 4.1, its threshold 2.3: a loss spike may follow within 8 steps".
std::string SpikeText(const SpikeEvent& event, const RunSpec& spec);

}  // namespace ballast
