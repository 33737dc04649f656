// What readers and Pull have of a run, to compare to the bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "client/cpp/client.h"
#include "client/cpp/follow/subscriber.h"

namespace ballast {

constexpr double kSoonS = 60;

// By tensor: codes, then scales.
using ServedBits = std::map<uint32_t, std::string>;

// How many elements share a scale, where the tensor is served with some.
inline uint64_t ElementsOfAScale(const v1::RunSpec& spec, const v1::TensorSpec& tensor) {
  const auto& shape = tensor.shape();
  const bool rows = spec.groups(static_cast<int>(tensor.group())).serving() != "int8-tensor" && shape.size() > 1 &&
                    *shape.rbegin() > 1;
  uint64_t elements = 1;
  for (const int64_t extent : shape) elements *= static_cast<uint64_t>(extent);
  return rows ? static_cast<uint64_t>(*shape.rbegin()) : elements;
}

// Of the run as it is, which has this spec.
inline ServedBits Pulled(Client& client, const v1::RunSpec& spec) {
  ServedBits bits;
  std::map<uint32_t, std::map<uint64_t, float>> scales;  // by row
  const auto sink = [&](const ServedPiece& piece) {
    const uint64_t row = piece.first / ElementsOfAScale(spec, spec.tensors(static_cast<int>(piece.tensor)));
    bits[piece.tensor].append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
    for (size_t i = 0; i < piece.scales.size(); ++i) scales[piece.tensor][row + i] = piece.scales[i];
    return absl::OkStatus();
  };
  EXPECT_EQ(client.PullServed(spec.run_id(), {}, sink), absl::OkStatus());
  for (auto& [tensor, bytes] : bits) {
    for (const auto& [row, scale] : scales[tensor]) bytes.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
  }
  return bits;
}

// Of the version that is here.
inline ServedBits Here(const Subscriber& reader) {
  ServedBits bits;
  for (uint32_t i = 0; i < static_cast<uint32_t>(reader.spec().tensors_size()); ++i) {
    const auto served = reader.Served(i);
    EXPECT_TRUE(served.ok()) << served.status();
    if (!served.ok()) return {};
    bits[i].assign(reinterpret_cast<const char*>(served->codes.data()), served->codes.size());
    bits[i].append(reinterpret_cast<const char*>(served->scales.data()), served->scales.size() * sizeof(float));
  }
  return bits;
}

// The version of this step, or a later one.
inline FollowedVersion Reach(Subscriber& reader, uint64_t step, uint64_t generation = 1) {
  for (;;) {
    const auto version = reader.Next(kSoonS);
    EXPECT_TRUE(version.ok() && *version) << version.status() << " on the way to step " << step;
    if (!version.ok() || !*version) return {};
    if ((*version)->step >= step && (*version)->generation >= generation) return **version;
  }
}

// A format, as the name of a test has it.
inline std::string InTestName(std::string format) {
  std::erase(format, '-');
  return format;
}

}  // namespace ballast
