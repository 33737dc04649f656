#include "client/cpp/transport/nccl_transport.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/nccl/nccl_loss.h"

namespace ballast {
namespace {

constexpr uint64_t kMostInMessage = 8 << 10;  // of a payload
constexpr uint64_t kLandedTogether = 8;       // weights

// Of slots; more, or larger ones, no daemon has. Sums of them are within 64 bits.
constexpr uint64_t kMostSlots = 1 << 20, kMostSlotBytes = 1 << 30;

bool AreOfADaemon(const v1::NcclSlots& slots) {
  return slots.gradient_slots() > 0 && slots.gradient_slots() <= kMostSlots && slots.gradient_slot_bytes() > 0 &&
         slots.gradient_slot_bytes() <= kMostSlotBytes && slots.weight_slot_bytes() > 0 &&
         slots.weight_slot_bytes() <= kMostSlotBytes;
}

}  // namespace

void NcclTransport::Start(const v1::TrainRequest& open) {
  v1::TrainRequest first = open;
  const auto gradients = parts_.nccl->MakeId(), weights = parts_.nccl->MakeId();
  if (gradients.ok() && weights.ok()) {
    ids_.set_gradients(*gradients);
    ids_.set_weights(*weights);
    *first.mutable_open()->mutable_nccl() = ids_;
  } else {
    parts_.on_none(std::string((gradients.ok() ? weights : gradients).status().message()), /*worked=*/false);
  }
  messages_.Start(first);
}

NcclTransport::~NcclTransport() {
  StopLinks();
  if (connecting_.joinable()) connecting_.join();
  EndLinks();
}

void NcclTransport::EndLinks() {
  if (weights_ == nullptr) return;
  try {
    std::thread other([this] { weights_.reset(); });
    gradients_.reset();
    other.join();
  } catch (const std::system_error&) {
    // One after the other, then, by the members' ends.
  }
}

absl::Status NcclTransport::Open(uint32_t slots) {
  auto rooms = parts_.gpu->Allocate(std::max<uint64_t>(slots * room_bytes_, 1));
  if (!rooms.ok()) return rooms.status();
  auto landing = parts_.gpu->Allocate(std::max<uint64_t>(kLandedTogether * landing_bytes_, 1));
  if (!landing.ok()) return landing.status();
  auto gradients = NcclLink::Open(parts_.nccl, parts_.gpu, ids_.gradients(), NcclLink::Side::kSends);
  if (!gradients.ok()) return gradients.status();
  auto weights = NcclLink::Open(parts_.nccl, parts_.gpu, ids_.weights(), NcclLink::Side::kReceives);
  if (!weights.ok()) return weights.status();
  absl::MutexLock lock(&mu_);
  rooms_memory_ = *std::move(rooms);
  landing_ = *std::move(landing);
  gradients_ = *std::move(gradients);
  weights_ = *std::move(weights);
  if (stopped_) return absl::CancelledError("the stream is over");
  rooms_.resize(slots);
  for (uint32_t slot = slots; slot-- > 0;) free_.push_back(slot);
  return absl::OkStatus();
}

void NcclTransport::Connect(uint32_t slots) {
  const auto began = std::chrono::steady_clock::now();
  absl::Status there = Open(slots);
  if (there.ok()) there = gradients_->AwaitReady(kNcclConnectS);
  const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - began;
  if (there.ok()) there = weights_->AwaitReady(std::max(0.0, kNcclConnectS - gone.count()));
  if (!there.ok()) return Lose(there);
  absl::MutexLock lock(&mu_);
  connected_ = !stopped_;
}

// --- who may write --------------------------------------------------------------------------------------------------

std::optional<GradientRoom> NcclTransport::Reserve(uint64_t bytes, bool keep) {
  if (bytes <= kMostInMessage || !connected_ || bytes > room_bytes_) return std::nullopt;
  absl::MutexLock lock(&mu_);
  if (free_.empty() || !lost_.ok()) return std::nullopt;
  const uint32_t slot = free_.back();
  free_.pop_back();
  rooms_[slot] = {.out = true, .kept = keep};
  return GradientRoom{.data = rooms_memory_->data() + slot * room_bytes_, .slot = slot};
}

void NcclTransport::Release(uint32_t slot) {
  absl::MutexLock lock(&mu_);
  rooms_[slot].kept = false;
  FreeUnused(slot);
}

void NcclTransport::FreeUnused(uint32_t slot) {
  if (!rooms_[slot].out && !rooms_[slot].kept) free_.push_back(slot);
}

absl::StatusOr<uint32_t> NcclTransport::Fill(const GradientRoom& room, absl::Span<const std::byte> payload) {
  if (auto s = parts_.gpu->Copy(room.data, payload.data(), payload.size()); !s.ok()) return s;
  return 0;
}

bool NcclTransport::WriteAt(const GradientRoom& room, uint64_t bytes, const v1::TrainRequest& request) {
  v1::TrainRequest message = request;
  message.mutable_gradient()->mutable_nccl()->set_bytes(static_cast<uint32_t>(bytes));
  message.mutable_gradient()->mutable_nccl()->set_slot(room.slot);
  if (auto s = gradients_->Begin({{room.data, bytes}}, NcclPatienceS(bytes)); !s.ok()) {
    Lose(s);
    return false;
  }
  ++moved_;
  return messages_.WriteAlone(message);
}

// --- the reading thread ---------------------------------------------------------------------------------------------

bool NcclTransport::Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) {
  read_on_gpu_ = false;
  if (!messages_.Read(response, data)) {
    StopLinks();
    return false;
  }
  if (response->has_opened() && response->opened().has_nccl()) OnOpened(response->opened().nccl());
  if (response->has_credit()) OnReturned(response->credit());
  const bool by_nccl = response->has_weights() && response->weights().has_nccl();
  return !by_nccl || ReadWeights(response->weights().nccl().bytes(), data);
}

void NcclTransport::OnOpened(const v1::NcclSlots& slots) {
  if (!slots.why_none().empty()) return parts_.on_none(slots.why_none(), /*worked=*/false);
  if (connecting_.joinable()) return;  // a daemon's fault, which is nothing to this end
  if (!AreOfADaemon(slots)) {
    return Lose(absl::InternalError(absl::StrCat("the daemon told of slots that none has, ", slots.gradient_slots(),
                                                 " of ", slots.gradient_slot_bytes(),
                                                 " bytes for gradients, others of ", slots.weight_slot_bytes())));
  }
  room_bytes_ = slots.gradient_slot_bytes();
  landing_bytes_ = slots.weight_slot_bytes();
  try {
    connecting_ = std::thread([this, count = slots.gradient_slots()] { Connect(count); });
  } catch (const std::system_error& none) {
    Lose(absl::ResourceExhaustedError(absl::StrCat("there is no thread to connect with: ", none.what())));
  }
}

bool NcclTransport::ReadWeights(uint64_t bytes, absl::Span<const std::byte>* data) {
  if (taken_ == landed_) {
    if (!AwaitConnected()) return false;
    if (auto s = Receive(bytes); !s.ok()) {
      Lose(s);
      return false;
    }
  }
  *data = {landing_->data() + taken_++ * landing_bytes_, bytes};
  read_on_gpu_ = true;
  ++moved_;
  return true;
}

absl::Status NcclTransport::Receive(uint64_t bytes) {
  std::vector<NcclLink::Piece> pieces = {{landing_->data(), bytes}};
  for (int i = 0; i < messages_.ahead() && pieces.size() < kLandedTogether; ++i) {
    const v1::Weights& weights = messages_.ahead(i).weights();
    if (!weights.has_nccl()) continue;
    pieces.push_back({landing_->data() + pieces.size() * landing_bytes_, weights.nccl().bytes()});
  }
  for (const NcclLink::Piece& piece : pieces) {
    if (piece.bytes > 0 && piece.bytes <= landing_bytes_) continue;
    return absl::InternalError("the daemon sent weights that do not fit the slots that it told of");
  }
  landed_ = static_cast<uint32_t>(pieces.size());
  taken_ = 0;
  return weights_->Move(pieces);
}

bool NcclTransport::AwaitConnected() {
  if (!connecting_.joinable()) Lose(absl::InternalError("the daemon sent weights before it had answered Open"));
  absl::MutexLock lock(&mu_);
  const auto decided = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return connected_ || stopped_; };
  mu_.Await(absl::Condition(&decided));
  return !stopped_;
}

void NcclTransport::OnReturned(const v1::Credit& credit) {
  absl::MutexLock lock(&mu_);
  for (const uint32_t slot : credit.nccl_slots()) {
    if (slot >= rooms_.size() || !rooms_[slot].out) continue;  // a daemon's fault, which is nothing to this end
    rooms_[slot].out = false;
    FreeUnused(slot);
  }
}

absl::Status NcclTransport::Finish() {
  absl::Status status = messages_.Finish();
  {
    absl::MutexLock lock(&mu_);
    if (!lost_.ok()) status = lost_;
  }
  if (IsNcclLost(status)) {
    parts_.on_none(std::string(status.message().substr(kNcclLostPrefix.size())), moved_ >= kWorked);
  }
  return status;
}

// --- any thread -----------------------------------------------------------------------------------------------------

void NcclTransport::Lose(const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (lost_.ok() && !stopped_) lost_ = NcclLostError(why.message());
  }
  Cancel();
}

void NcclTransport::StopLinks() {
  absl::MutexLock lock(&mu_);
  stopped_ = true;
  connected_ = false;
  if (gradients_ != nullptr) gradients_->Stop();
  if (weights_ != nullptr) weights_->Stop();
}

void NcclTransport::Cancel() {
  StopLinks();
  messages_.Cancel();
}

}  // namespace ballast
