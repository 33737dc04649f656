// A reader of versions in a test: applies what comes, as a client does, and checks all that it can.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/checksum.h"

#include "server/follow/version_sink.h"
#include "server/store/tensor_digester.h"

namespace ballast::testing {

// All of a run's weights as they are served, by tensor.
struct Served {
  std::string codes;
  std::vector<float> scales;  // of each row once, where there are some
  bool operator==(const Served&) const = default;
};
using ServedWeights = std::vector<Served>;

// Thread-safe, but for what is public and is told of a version: to be looked at when it has come.
class VersionReader : public VersionSink {
 public:
  VersionReader(const RunSpec* spec, ServedWeights weights, std::optional<VersionId> have, std::function<void()> sent)
      : spec_(spec), sent_(std::move(sent)), weights_(std::move(weights)), have_(have) {}

  void Write(const VersionOpening& opening) override {
    absl::MutexLock lock(&mu_);
    EXPECT_FALSE(open_);
    EXPECT_TRUE(!opening.base || opening.base == have_);
    open_ = opening;
    bytes_ = 0;
  }
  void Write(const VersionChunk& chunk) override {
    absl::MutexLock lock(&mu_);
    ASSERT_TRUE(open_);
    const TensorSpec& t = spec_->tensors[chunk.tensor];
    const size_t width = WireBytes(t.serving_format);
    const uint64_t first = ChunkBegin(*spec_, chunk.chunk), last = ChunkEnd(*spec_, t, chunk.chunk);
    Served& served = weights_[chunk.tensor];
    auto* const codes = reinterpret_cast<std::byte*>(served.codes.data());
    const ChangesView view{chunk.position_coding, chunk.value_coding, chunk.count, chunk.positions, chunk.values};
    const auto applied = ApplyChanges(view, width, absl::MakeSpan(codes + first * width, (last - first) * width));
    EXPECT_TRUE(applied.ok()) << applied;
    EXPECT_EQ(Crc32c(BytesOf(absl::StrCat(chunk.positions, chunk.values))), chunk.crc32c);
    const ScaleRange rows = ScalesOf(t, first, last);
    ASSERT_EQ(chunk.scales.size(), rows.size());
    std::copy(chunk.scales.begin(), chunk.scales.end(),
              served.scales.begin() + static_cast<std::ptrdiff_t>(rows.first));
    bytes_ += chunk.bytes();
    EXPECT_EQ(chunk.digest, chunk.last ? DigestOf(*spec_, weights_, chunk.tensor) : 0);
  }
  void Write(const VersionClosing& closing) override {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(closing.id, open_->id);
    EXPECT_EQ(bytes_, open_->bytes);
    have_ = closing.id;
    came.push_back(absl::StrCat(open_->base ? "+" : "", closing.id.step, open_->skipped > 0 ? "!" : ""));
    changed = closing.changed;
    sent_bytes = bytes_;
    open_.reset();
  }
  bool HasRoom(uint64_t) const override { return parts_++ < 3; }
  bool Send() override {
    parts_ = 0;
    if (ended_) return false;
    if (!held) sent_();
    return true;
  }
  void Finish(absl::Status status) override {
    absl::MutexLock lock(&mu_);
    if (!ended_) ended_ = std::move(status);
  }
  void Cancel() override {}

  // Once it has this version, in the order of came.
  ServedWeights At(uint64_t step) {
    absl::MutexLock lock(&mu_);
    const auto has = [&] { return have_ && have_->step == step && !open_; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&has), absl::Minutes(1))) << "version " << step;
    return weights_;
  }
  VersionId have() {
    absl::MutexLock lock(&mu_);
    return *have_;
  }
  std::optional<absl::Status> ended() {
    absl::MutexLock lock(&mu_);
    return ended_;
  }
  // Once its stream is over.
  bool AwaitEnd() {
    absl::MutexLock lock(&mu_);
    const auto over = [&] { return ended_.has_value(); };
    return mu_.AwaitWithTimeout(absl::Condition(&over), absl::Minutes(1));
  }
  ServedWeights weights() {
    absl::MutexLock lock(&mu_);
    return weights_;
  }
  void Sent() { sent_(); }

  static absl::Span<const std::byte> BytesOf(absl::string_view bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
  }
  static ServedWeights Blank(const RunSpec& spec) {
    ServedWeights weights;
    for (const TensorSpec& t : spec.tensors) {
      weights.push_back({std::string(ServingBytes(t), '\0'), std::vector<float>(ScaleCount(t))});
    }
    return weights;
  }
  static uint64_t DigestOf(const RunSpec& spec, const ServedWeights& weights, uint32_t tensor) {
    TensorDigester digester(&spec.tensors[tensor]);
    digester.Add(BytesOf(weights[tensor].codes), weights[tensor].scales, 0);
    return digester.Digest();
  }

  std::atomic<bool> held = false;  // it takes no message until Sent
  std::vector<std::string> came;   // versions: + as changes, ! after some that were skipped
  uint64_t changed = 0, sent_bytes = 0;

 private:
  const RunSpec* const spec_;
  const std::function<void()> sent_;
  absl::Mutex mu_;
  ServedWeights weights_;
  std::optional<VersionId> have_;
  std::optional<VersionOpening> open_;
  uint64_t bytes_ = 0;
  mutable int parts_ = 0;
  std::optional<absl::Status> ended_;
};

}  // namespace ballast::testing
