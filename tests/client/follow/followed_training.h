// A run of a real daemon that readers may follow, its trainer, and readers of it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/client/follow/served_bits.h"
#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"

namespace ballast {

constexpr char kRun[] = "least-squares";

struct FollowedTraining {
  explicit FollowedTraining(const std::string& server, const std::string& serving = "", bool rewinds = false,
                            const std::vector<std::string>& formats = {})
      : client(QuietClient(server)) {
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
  ServedBits Pulled() { return ballast::Pulled(*client, spec); }

  v1::RunSpec spec;
  std::unique_ptr<Client> client;
  LeastSquares problem;
};

inline std::unique_ptr<Subscriber> Follow(const std::string& server, uint64_t every = 0) {
  return Subscriber::Open({.server = server, .log = [](const std::string&) {}}, {.run_id = kRun, .every = every})
      .value();
}

}  // namespace ballast
