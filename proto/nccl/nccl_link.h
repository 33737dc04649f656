// One way between the GPUs of two processes: one end sends, the other receives as many bytes, in the same order. A link is a
// communicator of NCCL's, of two, so that nobody else waits for it or is lost with it. Its end aborts what is under way.
//
//   ASSIGN_OR_RETURN(auto link, NcclLink::Open(nccl, gpu, id, NcclLink::Side::kSends));   // the other end: kReceives
//   RETURN_IF_ERROR(link->AwaitReady(patience_s));
//   RETURN_IF_ERROR(link->Begin({{data, bytes}}, patience_s));   // the other end: of memory that has room for them
//   RETURN_IF_ERROR(link->AwaitDone(patience_s));
//
// Thread-compatible, but for Stop: any thread. DEADLINE_EXCEEDED: what was awaited did not come in time; CANCELLED: Stop was
// called; UNAVAILABLE, INTERNAL: NCCL or the GPU failed. After an error a link is of no use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/gpu/gpu.h"
#include "proto/nccl/nccl.h"

namespace ballast {

class NcclLink {
 public:
  enum class Side { kReceives, kSends };
  struct Piece {
    std::byte* at = nullptr;  // in the memory of the link's GPU
    uint64_t bytes = 0;
  };

  // Begins to connect to the other end, which has the same id (Nccl::MakeId), used by no other link.
  static absl::StatusOr<std::unique_ptr<NcclLink>> Open(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Gpu> gpu,
                                                        const std::string& id, Side side);
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Waits until both ends are there.
  absl::Status AwaitReady(double patience_s);
  // Begins to move the pieces, all at once, when the GPU has taken what was begun before; waits for that alone. It takes the
  // first when the other end has begun its first too.
  absl::Status Begin(absl::Span<const Piece> pieces, double patience_s);
  // Waits until all that was begun has been moved.
  absl::Status AwaitDone(double patience_s);
  // Both, with the patience that so many bytes get (nccl_loss.h).
  absl::Status Move(absl::Span<const Piece> pieces);
  // Whether it has; does not wait.
  absl::StatusOr<bool> Done();
  // Ends every wait, those to come too.
  void Stop() { stopped_ = true; }

 private:
  NcclLink(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Gpu> gpu, Side side);
  // Whether NCCL has done its part of the last call.
  absl::StatusOr<bool> Settled();
  absl::Status Await(absl::FunctionRef<absl::StatusOr<bool>()> there, double patience_s, const char* what);

  const std::shared_ptr<const Nccl> nccl_;
  const std::shared_ptr<Gpu> gpu_;
  const Side side_;
  std::unique_ptr<Gpu::Stream> stream_;
  void* communicator_ = nullptr;
  std::atomic<bool> stopped_ = false;
};

}  // namespace ballast
