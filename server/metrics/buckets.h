// Upper bounds of the histograms' buckets, ascending. Few: a run has each histogram once, or once for each phase.
#pragma once

#include <array>

namespace ballast {

// Steps last from milliseconds (tests, small models) to minutes.
inline constexpr std::array kSecondsBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,  0.25,
                                               0.5,   1.0,    2.5,   5.0,  10.0,  30.0, 60.0, 300.0};
// Coarser, for there are several phases.
inline constexpr std::array kPhaseBuckets = {0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0};
// From a small run on a fast disk to 70e9 parameters on a slow one; few, for each run has them for each phase.
inline constexpr std::array kCheckpointBuckets = {0.1, 1.0, 5.0, 30.0, 120.0, 600.0};
// As etcd's, of its write-ahead log: from a drive with a power-loss capacitor to one that is about to fail.
inline constexpr std::array kSyncBuckets = {0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.25, 1.0, 4.0};
inline constexpr std::array kStallBuckets = {0.001, 0.01, 0.1, 1.0, 10.0};
// Around 1, where RMS_t of a healthy tensor is, and 2.3, from where StableAdamW's authors call it a spike.
inline constexpr std::array kRmsBuckets = {0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 2.3, 3.0, 5.0, 10.0};
inline constexpr std::array kNormBuckets = {1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4};

}  // namespace ballast
