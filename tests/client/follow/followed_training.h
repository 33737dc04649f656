// A run of a real daemon that readers may follow, its trainer, and readers of it.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/cpp/follow/subscriber.h"
#include "tests/client/least_squares.h"

namespace ballast {

constexpr double kSoonS = 60;
constexpr char kRun[] = "least-squares";

struct FollowedTraining {
  explicit FollowedTraining(const std::string& server, const std::string& serving = "", bool rewinds = false,
                            const std::vector<std::string>& formats = {})
      : client(Client::Connect({.server = server, .log = [](const std::string&) {}}).value()) {
    spec = LeastSquares::Spec();
    spec.mutable_groups(0)->set_serving(serving);
    spec.mutable_follow()->set_tags(2);
    for (const std::string& format : formats) spec.mutable_follow()->add_formats(format);
    if (rewinds) {
      spec.mutable_rewind()->set_snapshots(2);
      spec.mutable_rewind()->set_every(2);
    }
    EXPECT_TRUE(client->CreateRun(spec).ok());
    EXPECT_TRUE(client->Attach({.run_id = kRun}).ok());
    const TensorView views[] = {{.tensor = 0, .format = "fp32", .bytes = problem.WeightBytes(0)},
                                {.tensor = 1, .format = "fp32", .bytes = problem.WeightBytes(1)}};
    EXPECT_TRUE(client->LoadWeights(views).ok());
    if (serving == "bf16" || serving == "fp16")
      return;  // they would land as such: it trains on with the weights that it has
    EXPECT_TRUE(problem.Bind(*client).ok());
  }
  void Train(int steps) {
    for (int i = 0; i < steps; ++i) ASSERT_TRUE(problem.Step(*client).ok());
  }
  // By tensor: codes, then scales, as a Pull brings them.
  std::map<uint32_t, std::string> Pulled() {
    std::map<uint32_t, std::string> codes;
    std::map<uint32_t, std::map<uint64_t, float>> scales;  // by row
    const auto sink = [&](const ServedPiece& piece) {
      codes[piece.tensor].append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
      const bool one_row = spec.groups(0).serving() == "int8-tensor";
      const uint64_t row = one_row ? 0 : piece.first / LeastSquares::kOutputs;  // the last dimension of both
      for (size_t i = 0; i < piece.scales.size(); ++i) scales[piece.tensor][row + i] = piece.scales[i];
      return absl::OkStatus();
    };
    EXPECT_TRUE(client->PullServed(kRun, {}, sink).ok());
    for (auto& [tensor, bytes] : codes) {
      for (const auto& [row, scale] : scales[tensor])
        bytes.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
    }
    return codes;
  }

  v1::RunSpec spec;
  std::unique_ptr<Client> client;
  LeastSquares problem;
};

inline std::unique_ptr<Subscriber> Follow(const std::string& server, uint64_t every = 0) {
  return Subscriber::Open({.server = server, .log = [](const std::string&) {}}, {.run_id = kRun, .every = every})
      .value();
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

inline std::map<uint32_t, std::string> Here(const Subscriber& reader) {
  std::map<uint32_t, std::string> codes;
  for (uint32_t i = 0; i < 2; ++i) {
    const auto served = reader.Served(i);
    EXPECT_TRUE(served.ok()) << served.status();
    codes[i].assign(reinterpret_cast<const char*>(served->codes.data()), served->codes.size());
    codes[i].append(reinterpret_cast<const char*>(served->scales.data()), served->scales.size() * sizeof(float));
  }
  return codes;
}

}  // namespace ballast
