#include "tests/bench/step_floor.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "proto/checksum.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kSlots = 2;  // of a rank, each way: the fewest, which stay in the nearest caches

absl::Span<const std::byte> BytesOf(const float* values, uint64_t count) {
  return {reinterpret_cast<const std::byte*>(values), count * sizeof(float)};
}
void Copy(const float* from, float* to, uint64_t count, uint32_t* checksums) {
  *checksums += CopyCrc32c(reinterpret_cast<std::byte*>(to), BytesOf(from, count));
}

struct Rank {
  explicit Rank(const StepShape& shape)
      : gradients(shape.tensors * shape.elements, 1e-3F),
        weights(gradients.size()),
        up(kSlots * shape.elements),
        down(up.size()) {}
  std::vector<float> gradients, weights, up, down;  // the last two are slots
  uint32_t checksums = 0;
  // Tensors since the first step.
  alignas(64) std::atomic<uint64_t> pushed = 0, landed = 0;  // by the rank
  alignas(64) std::atomic<uint64_t> summed = 0, served = 0;  // by who sums
};

class Floor {
 public:
  explicit Floor(const StepShape& shape) : shape_(shape), began_(shape.ranks + 1), ended_(shape.ranks + 1) {
    for (uint32_t r = 0; r < shape.ranks; ++r) ranks_.push_back(std::make_unique<Rank>(shape));
  }

  double Run() {
    std::vector<std::jthread> threads;
    for (auto& rank : ranks_) threads.emplace_back([this, &rank] { Train(rank.get()); });
    threads.emplace_back([this] { Sum(); });
    began_.arrive_and_wait();
    const auto began = std::chrono::steady_clock::now();
    ended_.arrive_and_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

 private:
  void Train(Rank* rank) {
    Step(rank, shape_.tensors);
    began_.arrive_and_wait();
    for (uint64_t step = 2; step <= shape_.steps + 1; ++step) Step(rank, step * shape_.tensors);
    ended_.arrive_and_wait();
  }

  // Pushes and lands whatever can be, until so many tensors are here.
  void Step(Rank* rank, uint64_t end) {
    while (rank->landed < end) {
      const uint64_t pushed = rank->pushed, landed = rank->landed;
      const bool pushes = pushed < end && pushed - rank->summed < kSlots, lands = landed < rank->served;
      if (pushes) {
        Copy(Of(&rank->gradients, pushed), Slot(&rank->up, pushed), shape_.elements, &rank->checksums);
        rank->pushed = pushed + 1;
      }
      if (lands) {
        Copy(Slot(&rank->down, landed), Of(&rank->weights, landed), shape_.elements, &rank->checksums);
        rank->landed = landed + 1;
      }
      if (!pushes && !lands) std::this_thread::yield();
    }
  }

  void Sum() {
    std::vector<float> sum(shape_.elements), weights(shape_.tensors * shape_.elements, 1.0F);
    for (uint64_t at = 0; at < (shape_.steps + 1) * uint64_t{shape_.tensors}; ++at) {
      for (auto& rank : ranks_) Add(rank.get(), at, &sum);
      float* const own = Of(&weights, at);
      for (uint64_t e = 0; e < shape_.elements; ++e) own[e] -= 1e-3F * sum[e];
      for (auto& rank : ranks_) Serve(own, rank.get(), at);
    }
  }

  void Add(Rank* rank, uint64_t at, std::vector<float>* sum) {
    while (rank->pushed <= at) std::this_thread::yield();
    const float* const gradient = Slot(&rank->up, at);
    rank->checksums += Crc32c(BytesOf(gradient, shape_.elements));
    if (rank == ranks_[0].get()) {
      std::copy(gradient, gradient + shape_.elements, sum->begin());
    } else {
      for (uint64_t e = 0; e < shape_.elements; ++e) (*sum)[e] += gradient[e];
    }
    rank->summed = at + 1;
  }

  void Serve(const float* weights, Rank* rank, uint64_t at) {
    while (at - rank->landed >= kSlots) std::this_thread::yield();
    std::copy(weights, weights + shape_.elements, Slot(&rank->down, at));
    rank->served = at + 1;
  }

  float* Of(std::vector<float>* values, uint64_t at) const {
    return values->data() + at % shape_.tensors * shape_.elements;
  }
  float* Slot(std::vector<float>* slots, uint64_t at) const { return slots->data() + at % kSlots * shape_.elements; }

  const StepShape shape_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::barrier<> began_, ended_;
};

}  // namespace

double StepFloorSeconds(const StepShape& shape) { return Floor(shape).Run(); }

}  // namespace ballast::bench
