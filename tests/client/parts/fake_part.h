// A part of a run, as its reader has it, whose versions a test has come: of one fp32 tensor of two elements, which are the
// version's step and generation. Thread-safe.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

#include "client/cpp/follow/change_signal.h"
#include "client/cpp/follow/held_subscriber.h"

namespace ballast {

inline v1::VersionId PartVersionId(uint64_t step, uint64_t generation = 1) {
  v1::VersionId id;
  id.set_step(step);
  id.set_generation(generation);
  id.set_epoch(9);
  return id;
}

class FakePart final : public HeldSubscriber {
 public:
  struct Sought {
    std::optional<uint64_t> from;
    uint64_t every;
  };

  FakePart(uint32_t index, uint32_t count, std::shared_ptr<ChangeSignal> changes) : changes_(std::move(changes)) {
    spec_.set_run_id("r");
    v1::RunPart* part = spec_.mutable_part();
    part->set_index(index);
    part->set_count(count);
    part->set_whole_tensors(count);
    part->add_tensors(count - 1 - index);  // the other way round
    v1::TensorSpec* tensor = spec_.add_tensors();
    tensor->set_name(absl::StrCat("w", index));
    tensor->set_dtype("fp32");
    tensor->add_shape(2);
    now_ = {.generation = 1, .epoch = 9};
  }

  // --- what a daemon does ---
  // As changes, which wait to be written.
  void Offer(const v1::VersionId& id) {
    Change([&] { standing_.waits = true, standing_.offered = id; });
  }
  // As a whole, which waits to be written, and then comes by Arrive.
  void OfferWhole(const v1::VersionId& id) {
    Change([&] { standing_.waits = comes_whole_ = true, standing_.offered = id; });
  }
  // A whole one is here, which nothing held back.
  void Arrive(const v1::VersionId& id) {
    Change([&] { Write(id, /*whole=*/true); });
  }
  // The run was amended: what is the first tensor of its two now was the second, and the other way round.
  void Amend() {
    Change([&] { standing_.waits = amends_ = true, standing_.offered.reset(); });
  }
  void Fail(absl::Status failure) {
    Change([&] { failure_ = std::move(failure), standing_.told = true; });
  }
  void Rewind(uint64_t generation) {
    absl::MutexLock lock(&mu_);
    now_.generation = generation;
  }
  // It has a version by this name, and no other by any.
  void Name(const std::string& tag, const v1::VersionId& id, uint64_t mark) {
    absl::MutexLock lock(&mu_);
    versions_.clear_tags();
    v1::TaggedVersion* const named = versions_.add_tags();
    named->set_name(tag);
    *named->mutable_id() = id;
    named->set_mark(mark);
  }
  // Whose version it was told to go to, last.
  std::string sought_tag() const {
    absl::MutexLock lock(&mu_);
    return sought_tag_;
  }
  // What it was told last, once it was.
  Sought AwaitSought() {
    absl::MutexLock lock(&mu_);
    const auto sought = [this] { return sought_.has_value(); };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&sought), absl::Minutes(1)));
    return *std::exchange(sought_, std::nullopt);
  }
  // --- HeldSubscriber ---
  Standing standing() const override {
    absl::MutexLock lock(&mu_);
    return standing_;
  }
  void Seek(std::optional<uint64_t> from, uint64_t every) override {
    Change([&] {
      sought_ = {from, every};
      if (standing_.offered) standing_.waits = comes_whole_ = false;
      standing_.offered.reset();
    });
  }
  void SeekTag(const std::string& tag) override {
    Change([&] {
      sought_tag_ = tag;
      if (standing_.offered) standing_.waits = comes_whole_ = false;
      standing_.offered.reset();
    });
  }
  absl::StatusOr<v1::ListVersionsResponse> VersionsFor(const std::string&) override {
    absl::MutexLock lock(&mu_);
    return versions_;
  }
  absl::StatusOr<Timeline> Now() override {
    absl::MutexLock lock(&mu_);
    return now_;
  }
  void EndVersion() override { changed_.clear(); }
  absl::StatusOr<std::optional<FollowedVersion>> Next(double) override {
    Change([this] {
      if (!std::exchange(standing_.waits, false)) return;
      if (std::exchange(amends_, false)) {
        spec_.mutable_part()->set_tensors(0, 1 - spec_.part().tensors(0));
        respecified_ = true;
        standing_.here.reset();
      } else if (std::exchange(comes_whole_, false)) {
        standing_.here.reset();
        standing_.offered.reset();
      } else {
        Write(*std::exchange(standing_.offered, std::nullopt), /*whole=*/false);
      }
    });
    absl::MutexLock lock(&mu_);
    standing_.told = failure_.has_value();
    if (!version_ && failure_) return *failure_;
    return std::exchange(version_, std::nullopt);
  }
  bool Await(double) override { return standing().told; }
  const v1::RunSpec& spec() const override { return spec_; }
  bool readable() const override { return standing().here.has_value(); }
  absl::StatusOr<FollowedTensor> Served(uint32_t) const override {
    return FollowedTensor{.format = "fp32", .codes = {reinterpret_cast<const std::byte*>(weights_), sizeof(weights_)}};
  }
  absl::Status Read(uint32_t, absl::Span<std::byte> out) const override {
    std::memcpy(out.data(), weights_, sizeof(weights_));
    return absl::OkStatus();
  }
  absl::StatusOr<uint64_t> CountChanged(uint32_t) const override { return 1; }
  absl::Status ReadChanged(uint32_t, absl::Span<int64_t> places, absl::Span<std::byte> values) const override {
    places[0] = 0;
    std::memcpy(values.data(), weights_, sizeof(float));
    return absl::OkStatus();
  }
  absl::Status Rollback(const std::string&) override { return absl::OkStatus(); }
  void Resume() override {}
  void Close() override { Fail(absl::CancelledError("the subscriber is closed")); }

 private:
  template <typename What>
  void Change(const What& what) {
    {
      absl::MutexLock lock(&mu_);
      what();
    }
    changes_->Notify();
  }
  void Write(const v1::VersionId& id, bool whole) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    weights_[0] = static_cast<float>(id.step());
    weights_[1] = static_cast<float>(id.generation());
    changed_ = {0};
    version_ = FollowedVersion{.step = id.step(), .generation = id.generation(), .changed = changed_};
    if (!whole) version_->base_step = standing_.here->step();
    version_->changed_elements = whole ? 2 : 1;
    version_->elements = 2;
    version_->received_bytes = version_->whole_bytes = 8;
    version_->closed_unix_s = static_cast<double>(id.step());
    version_->respecified = std::exchange(respecified_, false);
    standing_.here = id;
    standing_.told = true;
  }

  const std::shared_ptr<ChangeSignal> changes_;
  v1::RunSpec spec_;
  float weights_[2] = {};
  std::vector<uint32_t> changed_;
  mutable absl::Mutex mu_;
  Standing standing_;
  Timeline now_;
  std::optional<Sought> sought_;
  std::string sought_tag_;
  v1::ListVersionsResponse versions_;
  std::optional<FollowedVersion> version_;
  std::optional<absl::Status> failure_;
  bool comes_whole_ = false, amends_ = false, respecified_ = false;
};

}  // namespace ballast
