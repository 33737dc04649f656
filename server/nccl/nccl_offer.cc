#include "server/nccl/nccl_offer.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/start_thread.h"
#include "server/base/status_macros.h"
#include "server/slots/gpu_slots.h"
#include "server/slots/slot_shape.h"

namespace ballast {

absl::Status NcclOffer::Load() {
  bool on_gpu = false;
  for (size_t i = 0; i < devices_->size(); ++i) on_gpu = on_gpu || devices_->at(i)->cuda_number();
  if (!on_gpu) {
    return absl::FailedPreconditionError(absl::StrCat("nccl is true, and the device is ", devices_->description(),
                                                      ": NCCL is between GPUs; set device to one, or leave nccl out"));
  }
  auto nccl = Nccl::Load();
  if (!nccl.ok()) {
    return absl::Status(nccl.status().code(), absl::StrCat("nccl is true, and ", nccl.status().message()));
  }
  nccl_ = *std::move(nccl);
  return absl::OkStatus();
}

NcclOffer::~NcclOffer() {
  absl::MutexLock lock(&mu_);
  for (Thread& thread : threads_) thread.thread.join();
}

absl::Status NcclOffer::Check(int trainers_version, const Run& run) const {
  if (nccl_ == nullptr) {
    return absl::FailedPreconditionError("the daemon does not offer NCCL: start it with --nccl, or set nccl: true");
  }
  if (trainers_version != nccl_->version()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the trainer has NCCL ", NcclVersionText(trainers_version), ", the daemon ", NcclVersionText(nccl_->version()),
        ": start the daemon with the folder of the trainer's libnccl.so.2 in LD_LIBRARY_PATH"));
  }
  return CheckSlotsMayBeOnGpu(*devices_, run);
}

absl::StatusOr<std::shared_ptr<NcclLane>> NcclOffer::Open(const Run& run, const v1::NcclIds& ids) const {
  RETURN_IF_ERROR(Check(nccl_ == nullptr ? 0 : nccl_->version(), run));
  const ShmShape shape = GpuShapeOf(run.spec(), run.plan());
  ASSIGN_OR_RETURN(std::shared_ptr<SharedMemory> memory, ExportSlots(*devices_, run, shape));
  const Device& device = *devices_->at(run.plan().placement.devices.front());
  ASSIGN_OR_RETURN(auto gpu, Gpu::Open(device.cuda_number().value_or(0)));
  NcclLane::Parts parts{.nccl = nccl_, .gpu = std::move(gpu), .memory = std::move(memory), .shape = shape};
  return std::make_shared<NcclLane>(std::move(parts), ids);
}

absl::Status NcclOffer::Start(const std::shared_ptr<NcclLane>& lane, NcclLane::Events events) {
  lane->Tell(std::move(events));
  absl::MutexLock lock(&mu_);
  std::erase_if(threads_, [](Thread& thread) {
    if (!*thread.over) return false;
    thread.thread.join();
    return true;
  });
  try {
    Add([lane] { lane->Receive(); });
    Add([lane] { lane->Send(); });
  } catch (const NoThread& none) {
    lane->Stop();
    return absl::ResourceExhaustedError(none.what());
  }
  return absl::OkStatus();
}

void NcclOffer::Add(std::function<void()> run) {
  auto over = std::make_shared<std::atomic<bool>>(false);
  threads_.reserve(threads_.size() + 1);  // so that one that was started has its place
  std::thread started = StartThread([run = std::move(run), over]() mutable {
    run();
    run = nullptr;
    *over = true;
  });
  threads_.push_back({std::move(started), std::move(over)});
}

}  // namespace ballast
