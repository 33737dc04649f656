// Whole steps against a running daemon, of trainers that compute nothing: what is left is the client, the wire and the
// daemon. steps.py asks it in turns.
//
//   steps_bench SERVER
//   > TRANSPORT RANKS TENSORS PARAMETERS GRADIENT SERVING COMMIT AVERAGES STEPS
//   < SECONDS OWN_CPU_SECONDS LOAD_SECONDS PULL_SECONDS
//
// TRANSPORT: grpc, shm; memory is step_floor.h's, whose gradients and weights are fp32. TENSORS of one size hold the PARAMETERS. GRADIENT and SERVING: formats of the wire. COMMIT:
// release, staged. AVERAGES of the weights are kept. Each rank has a thread and a client, all in this process; SECONDS are of the STEPS after a first one
// that does not count, from the begin of the first rank to the end of the last. The rule is plain SGD over fp32
// weights: the cheapest update there is. LOAD and PULL: rank 0 uploads all weights in fp32 before the steps, and reads them
// after them.
#include <malloc.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

#include "client/cpp/client.h"
#include "client/cpp/wire/wire_format.h"
#include "tests/bench/step_floor.h"

namespace ballast::bench {
namespace {

struct Case {
  std::string transport;
  uint32_t ranks = 1, tensors = 1;
  uint64_t parameters = 0;
  std::string gradient, serving, commit;
  uint32_t averages = 0, steps = 1;

  uint64_t elements() const { return parameters / tensors; }  // of a tensor
};

[[noreturn]] void Die(const std::string& what) {
  std::printf("error: %s\n", what.c_str());
  std::fflush(stdout);
  _exit(1);
}

template <typename T>
T OrDie(absl::StatusOr<T> result) {
  if (!result.ok()) Die(result.status().ToString());
  return *std::move(result);
}
void OrDie(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

double SecondsSince(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

std::unique_ptr<Client> Connect(const std::string& server) {
  return OrDie(Client::Connect({.server = server, .log = [](const std::string&) {}}));
}

v1::RunSpec Spec(const Case& wanted, const std::string& run) {
  v1::RunSpec spec;
  spec.set_run_id(run);
  for (uint32_t i = 0; i < wanted.tensors; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", i));
    tensor->set_dtype("fp32");
    tensor->add_shape(static_cast<int64_t>(wanted.elements()));
  }
  v1::GroupSpec* group = spec.add_groups();
  group->set_rule("sgd");
  group->set_master("fp32");
  group->set_rounding("nearest");
  group->set_gradient(wanted.gradient);
  group->set_serving(wanted.serving);
  spec.set_commit(wanted.commit == "staged" ? v1::COMMIT_MODE_STAGED : v1::COMMIT_MODE_RELEASE);
  spec.set_ranks(wanted.ranks);
  for (uint32_t i = 0; i < wanted.averages; ++i) spec.add_averages(1 - std::pow(.1, i + 1));
  return spec;
}

// One rank: where its gradients lie, and where its weights arrive.
class Trainer {
 public:
  Trainer(const std::string& server, const Case& wanted, const std::string& run, uint32_t rank)
      : case_(wanted),
        run_(run),
        client_(Connect(server)),
        gradient_bytes_(wanted.elements() * FormatBytes(wanted.gradient)),
        // The top byte of each element is one that stands for a small number in every format.
        gradients_(wanted.tensors * gradient_bytes_, std::byte{0x11}),
        weights_(wanted.tensors * wanted.elements() * FormatBytes(wanted.serving)),
        scales_(wanted.tensors) {
    OrDie(client_->CreateRun(Spec(wanted, run)));
    const TransportChoice transport = wanted.transport == "shm" ? TransportChoice::kShm : TransportChoice::kGrpc;
    const auto attachment =
        OrDie(client_->Attach({.run_id = run, .rank = rank, .world = wanted.ranks, .transport = transport}));
    if (!attachment.weights_loaded) Load();
    Bind();
  }

  double load_s() const { return load_s_; }
  // Returns the seconds of it.
  double Pull() {
    const auto began = std::chrono::steady_clock::now();
    uint64_t bytes = 0;
    OrDie(client_->PullServed(run_, {}, [&](const ServedPiece& piece) {
      bytes += piece.codes.size();
      return absl::OkStatus();
    }));
    if (bytes != weights_.size()) Die("a pull brought other weights");
    return SecondsSince(began);
  }

  void Step() {
    OrDie(client_->BeginStep({.groups = {{.lr = 1e-3}}}));
    for (uint32_t i = case_.tensors; i-- > 0;) {
      OrDie(client_->Push(i, absl::MakeConstSpan(gradients_).subspan(i * gradient_bytes_, gradient_bytes_)));
    }
    const StepResult result = OrDie(client_->EndStep(std::nullopt).get());
    if (result.result.outcome() != v1::STEP_OUTCOME_APPLIED) Die("a step was not applied: " + result.result.reason());
    if (result.received.size() != case_.tensors) Die("weights are missing");
  }

 private:
  void Load() {
    // Of a layer's size: beside zeros, gradients as small as these are would make sums that no training has.
    std::vector<float> weights(case_.elements());
    for (size_t e = 0; e < weights.size(); ++e) weights[e] = 2e-5f * (static_cast<float>(e % 2003) - 1001);
    const auto bytes = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()), 4 * weights.size());
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < case_.tensors; ++i) views.push_back({i, "fp32", bytes});
    const auto began = std::chrono::steady_clock::now();
    OrDie(client_->LoadWeights(views).status());
    load_s_ = SecondsSince(began);
  }
  void Bind() {
    const WireFormat& serving = *FindFormat(case_.serving);
    const uint64_t bytes = case_.elements() * serving.bytes;
    for (uint32_t i = 0; i < case_.tensors; ++i) {
      // One row a tensor: one scale.
      const absl::Span<float> scale = absl::MakeSpan(&scales_[i], serving.scaling == Scaling::kNone ? 0 : 1);
      OrDie(client_->BindServed(i, weights_.data() + i * bytes, bytes, scale));
    }
  }

  const Case& case_;
  const std::string run_;
  const std::unique_ptr<Client> client_;
  const uint64_t gradient_bytes_;  // of a tensor
  std::vector<std::byte> gradients_, weights_;
  std::vector<float> scales_;
  double load_s_ = 0;
};

std::vector<std::unique_ptr<Trainer>> Join(const std::string& server, const Case& wanted, const std::string& run) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (uint32_t rank = 0; rank < wanted.ranks; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(server, wanted, run, rank));
  }
  return trainers;
}

void Measure(const std::string& server, const Case& wanted, const std::string& run) {
  std::vector<std::unique_ptr<Trainer>> trainers = Join(server, wanted, run);
  std::barrier ready(wanted.ranks + 1), ended(wanted.ranks + 1);
  std::vector<std::jthread> threads;
  for (auto& trainer : trainers) {
    threads.emplace_back([&] {
      trainer->Step();
      ready.arrive_and_wait();
      for (uint32_t i = 0; i < wanted.steps; ++i) trainer->Step();
      ended.arrive_and_wait();
    });
  }
  ready.arrive_and_wait();
  const auto began = std::chrono::steady_clock::now();
  const std::clock_t cpu = std::clock();
  ended.arrive_and_wait();
  const double seconds = SecondsSince(began), cpu_s = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  std::printf("%.9f %.6f %.6f %.6f\n", seconds, cpu_s, trainers[0]->load_s(), trainers[0]->Pull());
  std::fflush(stdout);
}

void PrintFloor(const Case& wanted) {
  const std::clock_t cpu = std::clock();
  const double seconds = StepFloorSeconds(
      {.ranks = wanted.ranks, .tensors = wanted.tensors, .elements = wanted.elements(), .steps = wanted.steps});
  std::printf("%.9f %.6f 0 0\n", seconds, static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
  std::fflush(stdout);
}

int Main(const std::string& server) {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // as a trainer's environment may
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  Case wanted;
  for (uint64_t number = 0; std::cin >> wanted.transport >> wanted.ranks >> wanted.tensors >> wanted.parameters >>
                            wanted.gradient >> wanted.serving >> wanted.commit >> wanted.averages >> wanted.steps;
       ++number) {
    if (wanted.transport == "memory") {
      PrintFloor(wanted);
      continue;
    }
    const std::string run = absl::StrCat("steps-", number);
    Measure(server, wanted, run);
    OrDie(Connect(server)->DeleteRun(run, true).status());
  }
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // as the Python package does
  return ballast::bench::Main(argv[1]);
}
