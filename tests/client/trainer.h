// A trainer of the fake daemon's run for the client's tests: buffers for the weights, gradients that differ by tensor
// and step, and one call for a whole step.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proto/checksum.h"

#include "client/cpp/client.h"
#include "client/cpp/wire/tensor_table.h"
#include "tests/client/fake_daemon.h"

namespace ballast {

inline std::string GradientOf(const std::string& tensor, uint64_t bytes, uint64_t step) {
  std::string gradient(bytes, '\0');
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = static_cast<char>(7 * i + 31 * static_cast<uint64_t>(tensor[0]) + 101 * step);
  }
  return gradient;
}

struct Trainer {
  Trainer(const std::string& server, double reconnect_timeout_s = 5, double connect_timeout_s = 5)
      : client(Client::Connect({.server = server,
                                .connect_timeout_s = connect_timeout_s,
                                .reconnect_timeout_s = reconnect_timeout_s,
                                .log =
                                    [this](const std::string& line) {
                                      absl::MutexLock lock(&mu);
                                      lines.push_back(line);
                                    }})
                   .value()) {}
  ~Trainer() { client.reset(); }  // before what it writes to

  absl::Status Attach(const v1::RunSpec& spec = FakeSpec()) {
    attachment = client->Attach({.run_id = "r"});
    if (!attachment.ok()) return attachment.status();
    tensors = TensorTable::Create(spec, 4).value();
    weights.resize(tensors.size());
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      weights[i].assign(tensors[i].weight_bytes(), '?');
      if (auto s = client->BindWeights(i, weights[i].data(), weights[i].size()); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  std::string Gradient(uint32_t tensor, uint64_t step) const {
    return GradientOf(tensors[tensor].name, tensors[tensor].gradient_bytes(), step);
  }
  absl::Status Push(uint32_t tensor) { return client->Push(tensor, BytesOf(Gradient(tensor, client->step()))); }

  // One step with gradients of these tensors, last first.
  absl::StatusOr<StepResult> Step(std::vector<uint32_t> which = {3, 2, 1, 0}) {
    if (auto s = client->BeginStep({.groups = {{.lr = 0.5}}}); !s.ok()) return s;
    for (const uint32_t tensor : which) {
      if (auto s = Push(tensor); !s.ok()) return s;
    }
    return client->EndStep(1.5).get();
  }

  std::vector<std::string> Lines() {
    absl::MutexLock lock(&mu);
    return lines;
  }

  absl::Mutex mu;
  std::vector<std::string> lines ABSL_GUARDED_BY(mu);  // what the client told people
  TensorTable tensors;
  std::vector<std::string> weights;  // by tensor
  absl::StatusOr<Attachment> attachment;
  std::unique_ptr<Client> client;
};

// Loads weights into the tensors 0 and 3: they arrive whole, and their digests return.
inline void Upload(Trainer& trainer, FakeDaemon& daemon) {
  const std::string a = GradientOf("a", 40, 9), d = GradientOf("d", 24, 9);
  const TensorView views[] = {{.tensor = 0, .format = "fp32", .bytes = BytesOf(a)},
                              {.tensor = 3, .format = "fp32", .bytes = BytesOf(d)}};
  const auto digests = trainer.client->LoadWeights(views);
  ASSERT_TRUE(digests.ok()) << digests.status();
  EXPECT_THAT(*digests, ::testing::ElementsAre(WeightDigest(BytesOf(a)), WeightDigest(BytesOf(d))));
  EXPECT_EQ(daemon.seen().uploaded, (std::map<uint32_t, std::string>{{0, a}, {3, d}}));
}

}  // namespace ballast
