// The transport between GPUs by NCCL, on one host or several: messages go over gRPC, and payloads, but small ones, from the
// trainer's GPU to the daemon's and back. See transport.h, and proto/PROTOCOL.md, "NCCL".
//
// Until both ends have connected, payloads go in the messages too, and so does a gradient that finds no slot. When NCCL is lost,
// the stream is: Finish says so (proto/nccl/nccl_loss.h).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/gpu/gpu.h"
#include "proto/nccl/nccl.h"
#include "proto/nccl/nccl_link.h"

#include "client/cpp/transport/grpc_transport.h"
#include "client/cpp/transport/transport.h"

namespace ballast {

class NcclTransport final : public Transport {
 public:
  struct Parts {
    std::shared_ptr<const Nccl> nccl;
    std::shared_ptr<Gpu> gpu;  // the trainer's
    // Told by the reading thread why no payload goes by NCCL, or no more. worked: it has moved kWorked payloads, so whoever
    // resumes the stream does well to try it again; else it would come to nothing once more.
    std::function<void(const std::string& why, bool worked)> on_none;
  };
  static constexpr uint64_t kWorked = 1000;
  // `connection` outlives the transport.
  NcclTransport(Connection& connection, Parts parts) : parts_(std::move(parts)), messages_(connection) {}
  ~NcclTransport() override;

  void Start(const v1::TrainRequest& open) override;
  bool Write(v1::TrainRequest* request, bool more) override { return messages_.Write(request, more); }
  bool WritesDone() override { return messages_.WritesDone(); }
  bool has_rooms() const override { return true; }
  bool writes_at_once() const override { return connected_; }
  std::optional<GradientRoom> Reserve(uint64_t bytes, bool keep) override;
  void Release(uint32_t slot) override;
  absl::StatusOr<uint32_t> Fill(const GradientRoom& room, absl::Span<const std::byte> payload) override;
  bool WriteAt(const GradientRoom& room, uint64_t bytes, const v1::TrainRequest& request) override;
  bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) override;
  bool reads_on_gpu() const override { return read_on_gpu_; }
  bool on_gpu() const override { return connected_; }
  void Cancel() override;
  absl::Status Finish() override;

 private:
  // A room for gradients: free when neither is true.
  struct Room {
    bool out = false, kept = false;
  };

  void OnOpened(const v1::NcclSlots& slots);
  // Of the connecting thread.
  void Connect(uint32_t slots);
  absl::Status Open(uint32_t slots);
  bool AwaitConnected();  // false: the stream is over
  bool ReadWeights(uint64_t bytes, absl::Span<const std::byte>* data);
  // Those of a message, and of others that have arrived behind it.
  absl::Status Receive(uint64_t bytes);
  void OnReturned(const v1::Credit& credit);
  void FreeUnused(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Lose(const absl::Status& why);
  void StopLinks();
  // Both at once: NCCL, where it frees one's memory, waits for the GPU, and so for what the other has under way.
  void EndLinks();

  const Parts parts_;
  GrpcTransport messages_;
  v1::NcclIds ids_;
  bool read_on_gpu_ = false;

  // Made by the connecting thread. From connected_ on the link of gradients is of who may write, the other of the reading thread.
  std::unique_ptr<Gpu::Memory> rooms_memory_, landing_;
  uint64_t room_bytes_ = 0, landing_bytes_ = 0;
  uint32_t landed_ = 0, taken_ = 0;  // places of landing_ with weights, and those of them that were read
  std::unique_ptr<NcclLink> gradients_, weights_;
  std::thread connecting_;
  std::atomic<bool> connected_ = false;
  std::atomic<uint64_t> moved_ = 0;  // payloads

  absl::Mutex mu_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status lost_ ABSL_GUARDED_BY(mu_);
  std::vector<Room> rooms_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
