// Trains a small network on Fashion-MNIST, in one process or several that share every batch:
//
//   ballastd &
//   ballast_fashion_mnist --data /usr/share/datasets/fashion-mnist --rank 0 --world 2 &
//   ballast_fashion_mnist --data /usr/share/datasets/fashion-mnist --rank 1 --world 2
//
//   --data DIR      holds train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k, perhaps with .gz
//   --server HOST:PORT   localhost:7700
//   --run ID        fashion-mnist; one that exists is gone on with
//   --rank, --world      which process of how many; 0 and 1
//   --micros N      micro-batches into which a process cuts its share of a batch; 1
//   --epochs N      8
//   --steps N       ends after so many steps of the whole schedule
//   --seed N        of the first weights and of the order of samples; 1
//
// A batch is cut into world * micros contributions, which the daemon adds in order: so two processes give, to the bit,
// the weights of one with two micro-batches. The last line tells the weights' digest, and how many test images are
// classified rightly.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <numbers>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "client/cpp/client.h"
#include "client/cpp/examples/idx_file.h"
#include "client/cpp/examples/perceptron.h"

namespace ballast::examples {
namespace {

constexpr size_t kBatch = 128;
constexpr double kPeakLr = 2e-3;
constexpr int kUploadWaitS = 60;

struct Flags {
  std::string data, server = "localhost:7700", run = "fashion-mnist";
  uint32_t rank = 0, world = 1, micros = 1, epochs = 8, steps = 0, seed = 1;
};

absl::StatusOr<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  const std::map<std::string, std::string*> texts = {
      {"--data", &flags.data}, {"--server", &flags.server}, {"--run", &flags.run}};
  const std::map<std::string, uint32_t*> numbers = {{"--rank", &flags.rank},     {"--world", &flags.world},
                                                    {"--micros", &flags.micros}, {"--epochs", &flags.epochs},
                                                    {"--steps", &flags.steps},   {"--seed", &flags.seed}};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    const auto text = texts.find(name);
    const auto number = numbers.find(name);
    if (text == texts.end() && number == numbers.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag '", name, "'; the top of fashion_mnist.cc lists all"));
    }
    if (text != texts.end()) *text->second = value;
    if (number != numbers.end() && !absl::SimpleAtoi(value, number->second)) {
      return absl::InvalidArgumentError(absl::StrCat(name, " wants a number, got '", value, "'"));
    }
  }
  if (flags.data.empty()) return absl::InvalidArgumentError("--data is missing: the folder with the images");
  const uint64_t contributions = uint64_t{flags.world} * flags.micros;
  if (contributions == 0 || kBatch % contributions != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--world times --micros is ", contributions, "; it must divide ",
                                                   kBatch, ", the samples of a batch"));
  }
  return flags;
}

absl::StatusOr<IdxArray> ReadEither(const std::string& path) {
  auto array = ReadIdx(path);
  return absl::IsNotFound(array.status()) ? ReadIdx(path + ".gz") : array;
}

absl::StatusOr<Samples> ReadSamples(const std::string& folder, const std::string& part) {
  auto images = ReadEither(absl::StrCat(folder, "/", part, "-images-idx3-ubyte"));
  if (!images.ok()) return images.status();
  auto labels = ReadEither(absl::StrCat(folder, "/", part, "-labels-idx1-ubyte"));
  if (!labels.ok()) return labels.status();
  Samples samples{std::move(images->values), std::move(labels->values)};
  if (samples.count() == 0 || samples.pixels.size() != samples.count() * Perceptron::kPixels) {
    return absl::InvalidArgumentError(absl::StrCat(folder, ": ", part, " has ", samples.pixels.size(), " pixels and ",
                                                   samples.count(), " labels; wanted: ", Perceptron::kPixels,
                                                   " pixels for each label"));
  }
  if (const uint8_t most = *std::max_element(samples.labels.begin(), samples.labels.end());
      most >= Perceptron::kClasses) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": ", part, " has the label ", most, "; wanted: below ", Perceptron::kClasses));
  }
  return samples;
}

absl::Span<const std::byte> Bytes(absl::Span<const float> values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
}

// Gradients are added, not averaged: each contribution is divided by the whole batch already.
v1::RunSpec Spec(const Flags& flags) {
  v1::RunSpec spec;
  spec.set_run_id(flags.run);
  for (const Perceptron::Shape& shape : Perceptron::kShapes) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(shape.name);
    tensor->set_dtype("fp32");
    if (shape.rows > 0) tensor->add_shape(static_cast<int64_t>(shape.rows));
    tensor->add_shape(static_cast<int64_t>(shape.columns));
  }
  v1::GroupSpec* group = spec.add_groups();
  group->set_rule("adamw");
  (*group->mutable_hyper())["weight_decay"] = 0.01;
  spec.set_ranks(flags.world);
  spec.set_accumulation(flags.micros);
  spec.set_reduction(v1::REDUCTION_SUM);
  spec.set_seed(flags.seed);
  return spec;
}

class Trainer {
 public:
  Trainer(Flags flags, Samples train, Client* client)
      : flags_(std::move(flags)), train_(std::move(train)), model_(flags_.seed), client_(*client) {}
  ~Trainer() { client_.Detach(); }  // before the weights go that it writes to
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Creates or finds the run, and has its weights.
  absl::Status Join() {
    if (auto created = client_.CreateRun(Spec(flags_)); !created.ok()) return created.status();
    const auto attachment = client_.Attach({.run_id = flags_.run, .rank = flags_.rank, .world = flags_.world});
    if (!attachment.ok()) return attachment.status();
    if (!attachment->weights_loaded) {
      if (auto s = flags_.rank == 0 ? Upload() : AwaitUpload(); !s.ok()) return s;
    }
    for (uint32_t tensor = 0; tensor < Perceptron::kTensors; ++tensor) {
      std::vector<float>& weights = model_.weights(tensor);
      if (auto s = client_.BindWeights(tensor, weights.data(), weights.size() * sizeof(float)); !s.ok()) return s;
    }
    return client_.Pull(
        flags_.run, {}, [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t) {
          std::copy(piece.begin(), piece.end(), reinterpret_cast<std::byte*>(model_.weights(tensor).data()) + offset);
          return absl::OkStatus();
        });
  }

  absl::Status Train() {
    const uint64_t steps = flags_.epochs * steps_an_epoch();
    const uint64_t last = flags_.steps > 0 ? std::min<uint64_t>(flags_.steps, steps) : steps;
    while (client_.step() <= last) {
      const uint64_t step = client_.step();
      const auto loss = Step(step, kPeakLr * Cosine(static_cast<double>(step - 1) / static_cast<double>(steps)));
      if (!loss.ok()) return loss.status();
      if (flags_.rank == 0 && step % steps_an_epoch() == 0) {
        std::printf("epoch %llu  loss %.4f\n", static_cast<unsigned long long>(step / steps_an_epoch()), *loss);
      }
    }
    return absl::OkStatus();
  }

  void Report(const Samples& test) {
    uint64_t digests[Perceptron::kTensors];
    for (uint32_t i = 0; i < Perceptron::kTensors; ++i) digests[i] = WeightDigest(Bytes(model_.weights(i)));
    const uint64_t whole = WeightDigest({reinterpret_cast<const std::byte*>(digests), sizeof digests});
    std::printf("weights %016llx  accuracy %.4f\n", static_cast<unsigned long long>(whole), model_.Accuracy(test));
  }

 private:
  uint64_t steps_an_epoch() const { return train_.count() / kBatch; }
  static double Cosine(double progress) { return (1 + std::cos(std::numbers::pi * progress)) / 2; }

  absl::Status Upload() {
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < Perceptron::kTensors; ++i) views.push_back({i, "fp32", Bytes(model_.weights(i))});
    return client_.LoadWeights(views).status();
  }

  absl::Status AwaitUpload() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kUploadWaitS);
    while (std::chrono::steady_clock::now() < until) {
      const auto run = client_.GetRun(flags_.run);
      if (!run.ok()) return run.status();
      if (run->status().weights_loaded()) return absl::OkStatus();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return absl::DeadlineExceededError(absl::StrCat("rank 0 has not uploaded its weights for ", kUploadWaitS, " s"));
  }

  // The samples of the step's batch: each epoch takes all in an order of its own, the same on every rank.
  absl::Span<const uint32_t> BatchOf(uint64_t step) {
    const uint64_t epoch = (step - 1) / steps_an_epoch();
    if (order_.empty() || epoch != order_epoch_) {
      order_.resize(train_.count());
      std::iota(order_.begin(), order_.end(), 0);
      std::mt19937_64 random(flags_.seed * 1000003 + epoch);
      std::shuffle(order_.begin(), order_.end(), random);
      order_epoch_ = epoch;
    }
    return absl::MakeConstSpan(order_).subspan((step - 1) % steps_an_epoch() * kBatch, kBatch);
  }

  // The loss of this rank's share, before the step.
  absl::StatusOr<double> Step(uint64_t step, double lr) {
    if (auto s = client_.BeginStep({.groups = {{.lr = lr}}, .micro_batches = flags_.micros}); !s.ok()) return s;
    const absl::Span<const uint32_t> batch = BatchOf(step);
    const size_t share = kBatch / (flags_.world * flags_.micros);
    const auto push = [&](uint32_t tensor, absl::Span<const float> gradient) {
      return client_.Push(tensor, Bytes(gradient));
    };
    double mean = 0;
    for (uint32_t micro = 0; micro < flags_.micros; ++micro) {
      const size_t contribution = micro * flags_.world + flags_.rank;  // in the order in which they are added
      const auto samples = batch.subspan(contribution * share, share);
      const auto loss = model_.Backward(train_, samples, static_cast<double>(kBatch), push);
      if (!loss.ok()) return loss;
      const double its_mean = *loss * static_cast<double>(kBatch) / static_cast<double>(share);
      mean += its_mean / flags_.micros;
      if (micro + 1 < flags_.micros) {
        if (auto s = client_.EndMicro(its_mean); !s.ok()) return s;
      } else if (auto result = client_.EndStep(its_mean).get(); !result.ok()) {
        return result.status();
      } else if (result->result.outcome() != v1::STEP_OUTCOME_APPLIED) {
        return absl::AbortedError(absl::StrCat("step ", step, " was not applied: ", result->result.reason()));
      }
    }
    return mean;
  }

  const Flags flags_;
  const Samples train_;
  Perceptron model_;
  Client& client_;
  std::vector<uint32_t> order_;
  uint64_t order_epoch_ = 0;
};

absl::Status Run(int argc, char** argv) {
  auto flags = ParseFlags(argc, argv);
  if (!flags.ok()) return flags.status();
  auto train = ReadSamples(flags->data, "train"), test = ReadSamples(flags->data, "t10k");
  if (!train.ok()) return train.status();
  if (!test.ok()) return test.status();
  if (train->count() < kBatch) return absl::InvalidArgumentError(absl::StrCat("fewer than ", kBatch, " samples"));
  auto client = Client::Connect({.server = flags->server});
  if (!client.ok()) return client.status();
  Trainer trainer(*flags, *std::move(train), client->get());
  if (auto s = trainer.Join(); !s.ok()) return s;
  if (auto s = trainer.Train(); !s.ok()) return s;
  trainer.Report(*test);
  return absl::OkStatus();
}

}  // namespace
}  // namespace ballast::examples

int main(int argc, char** argv) {
  const absl::Status status = ballast::examples::Run(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
