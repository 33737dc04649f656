// The transport to a daemon on the same host: gradients are copied into slots of the shared segment, and weights are
// read from theirs. Where the trainer's GPU reaches the daemon's, the slots are in the memory of that. See transport.h,
// and proto/shm/segment.h for what is shared. The daemon is trusted as much as its gRPC port is; what it writes is
// checked all the same, so that a broken daemon ends the stream and not the trainer.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "proto/gpu/gpu.h"
#include "proto/shm/bell.h"
#include "proto/shm/pulse.h"
#include "proto/shm/record.h"
#include "proto/shm/slots.h"
#include "proto/shm/socket.h"

#include "client/cpp/transport/transport.h"

namespace ballast {

class ShmTransport final : public Transport {
 public:
  // Asks the daemon at `path` for the memory of the session of `token`, and waits for the answer for patience_s. The
  // error says why the two cannot share memory. gpu: the trainer's; then *why_host says why the slots are in the host's memory;
  // empty: they are in that of the daemon's GPU.
  static absl::StatusOr<std::unique_ptr<ShmTransport>> Open(const std::string& path, const std::string& token,
                                                            double patience_s = 0.5,
                                                            const std::shared_ptr<Gpu>& gpu = nullptr,
                                                            std::string* why_host = nullptr);

  void Start(const v1::TrainRequest& open) override;
  bool Write(v1::TrainRequest* request, bool more) override;
  bool WritesDone() override { return Send({.type = ShmRecord::kHalfClose}, ""); }
  bool has_rooms() const override { return true; }
  bool writes_at_once() const override { return writer_.room() >= kAtOnce; }
  std::optional<GradientRoom> Reserve(uint64_t bytes, bool keep) override;
  void Release(uint32_t slot) override { lender_.Release(slot); }
  absl::StatusOr<uint32_t> Fill(const GradientRoom& room, absl::Span<const std::byte> payload) override;
  bool WriteAt(const GradientRoom& room, uint64_t bytes, const v1::TrainRequest& request) override;
  uint64_t slots_free() const override { return lender_.free(); }
  bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) override;
  bool reads_on_gpu() const override { return borrowed_ && on_gpu(); }
  bool on_gpu() const override { return on_gpu_.memory != nullptr; }
  bool HungUp() const override { return socket_.HungUp(); }
  void Cancel() override;
  absl::Status Finish() override { return *end_; }

 private:
  // Of the pipe: more than what comes between two gradients takes, but for what lists many tensors.
  static constexpr uint64_t kAtOnce = 32 << 10;

  // The trainer's, if it has one, and the slots' memory, if it is there.
  struct OnGpu {
    std::shared_ptr<Gpu> gpu = nullptr;
    std::unique_ptr<Gpu::Memory> memory = nullptr;
    std::byte* data() const { return memory == nullptr ? nullptr : memory->data(); }
  };

  ShmTransport(ShmSocket socket, std::shared_ptr<ShmSegment> segment, OnGpu on_gpu);
  static absl::StatusOr<std::unique_ptr<ShmTransport>> OpenForGpu(const std::string& path, const std::string& token,
                                                                  double patience_s, const std::shared_ptr<Gpu>& gpu,
                                                                  std::string* why_host);
  // `more`: another record comes at once, so that the daemon need not be woken yet.
  bool Send(const ShmRecord& record, absl::string_view body, bool more = false);
  // The next record, however long it takes. False: end_ says why.
  bool Next(ShmRecord* record);
  bool End(absl::Status status);
  void GiveBack();

  const ShmSocket socket_;
  const std::shared_ptr<ShmSegment> segment_;
  const OnGpu on_gpu_;
  ShmControl& control_;
  std::atomic<bool> over_ = false;

  // The writing thread's, but for the lender.
  ShmRecordWriter writer_;
  std::string body_;  // of the record in hand; its memory stays
  int unrung_ = 0;    // records that the daemon was not woken for
  ShmLender lender_;
  ShmWaiter room_;

  // The reading thread's.
  ShmRecordReader reader_;
  ShmBorrower borrower_;
  ShmWaiter news_;
  ShmPulse pulse_;
  std::optional<uint32_t> borrowed_;
  std::optional<absl::Status> end_;  // once Read was false
};

}  // namespace ballast
