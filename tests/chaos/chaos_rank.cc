#include "tests/chaos/chaos_rank.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/client.h"

namespace ballast::chaos {
namespace {

class ClientRank final : public Rank {
 public:
  using Rank::Rank;
  ~ClientRank() override { client_.reset(); }  // before what it writes to

  absl::Status Join(const std::string& server) override {
    auto client = Client::Connect({.server = server, .reconnect_timeout_s = 60, .log = [](const std::string&) {}});
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    if (auto created = client_->CreateRun(Spec(options_)); !created.ok()) return created.status();
    const auto attachment = client_->Attach({.run_id = kRun, .rank = rank_, .world = kWorld});
    if (!attachment.ok()) return attachment.status();
    if (rank_ == 0) {
      std::vector<TensorView> views;
      for (uint32_t i = 0; i < kTensors; ++i) views.push_back({i, "fp32", Bytes(weights_[i])});
      if (auto loaded = client_->LoadWeights(views); !loaded.ok()) return loaded.status();
    }
    for (uint32_t i = 0; i < kTensors; ++i) {
      const uint64_t bytes = weights_[i].size() * sizeof(float);
      if (auto s = client_->BindWeights(i, weights_[i].data(), bytes); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  absl::Status Step(uint64_t step) override {
    const uint32_t micros = Micros(options_, step);
    if (auto s = client_->BeginStep({.groups = {{.lr = 1e-2}}, .micro_batches = micros}); !s.ok()) return s;
    for (uint32_t micro = 0; micro < micros; ++micro) {
      for (uint32_t i = kTensors; i-- > 0;) {
        const std::vector<float> gradient = Gradient(step, micro, i);
        if (gradient.empty()) continue;
        if (auto s = client_->Push(i, Bytes(gradient)); !s.ok()) return s;
      }
      if (micro + 1 == micros) break;
      if (auto s = client_->EndMicro(0.5); !s.ok()) return s;
    }
    const auto closed = client_->EndStep(0.5).get();
    if (!closed.ok()) return closed.status();
    const v1::StepResult& result = closed->result;
    if (result.step() == step && result.outcome() == v1::STEP_OUTCOME_APPLIED) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("step ", step, " ended as ", result.ShortDebugString()));
  }

 private:
  std::unique_ptr<Client> client_;
};

}  // namespace

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

v1::RunSpec Spec(const ChaosOptions& options) {
  v1::RunSpec spec;
  spec.set_run_id(kRun);
  for (uint32_t i = 0; i < kTensors; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("w", i));
    tensor->add_shape(kElements[i]);
    tensor->set_dtype("fp32");
  }
  spec.add_groups()->set_rule("adamw");
  spec.set_commit(options.staged ? v1::COMMIT_MODE_STAGED : v1::COMMIT_MODE_RELEASE);
  spec.set_accumulation(2);
  spec.set_ranks(kWorld);
  spec.set_seed(options.seed);
  return spec;
}

uint32_t Micros(const ChaosOptions& options, uint64_t step) {
  return 1 + static_cast<uint32_t>(Mix(options.seed, step) % 2);
}

Rank::Rank(const ChaosOptions& options, uint32_t rank) : options_(options), rank_(rank) {
  for (uint32_t i = 0; i < kTensors; ++i) weights_[i].resize(kElements[i]);
}

// The way to a target of this rank's own.
std::vector<float> Rank::Gradient(uint64_t step, uint32_t micro, uint32_t tensor) const {
  const uint64_t all = Mix(Mix(options_.seed, step), tensor), own = Mix(all, 1 + rank_ + kWorld * micro);
  if (all % 7 == 0 || own % 7 == 0) return {};
  std::vector<float> gradient(kElements[tensor]);
  const float target = static_cast<float>(1 + rank_ + micro);
  for (uint32_t k = 0; k < kElements[tensor]; ++k) {
    gradient[k] = 2 * weights_[tensor][k] - target - static_cast<float>((k + step) % 17) / 16;
  }
  return gradient;
}

std::unique_ptr<Rank> MakeClientRank(const ChaosOptions& options, uint32_t rank) {
  return std::make_unique<ClientRank>(options, rank);
}

}  // namespace ballast::chaos
