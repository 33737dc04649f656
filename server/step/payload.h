// The bytes of one gradient chunk on their way to the sum. The payload owns them, or borrows them from a transport's
// memory, where they stay until they are summed. The trainer may change borrowed bytes at any time, so nothing that is
// read from them may decide which memory is touched. Where they are in a GPU's memory, only its device reads them. A movable
// value; thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/types/span.h"

namespace ballast {

class Payload {
 public:
  // The owner of borrowed memory; shared by all payloads that borrow from it. Thread-safe.
  class Lender {
   public:
    virtual ~Lender() = default;
    virtual void GiveBack(uint32_t slot) = 0;
    virtual bool on_device() const { return false; }
    // Copies borrowed bytes to host memory.
    virtual void Read(absl::Span<const std::byte> borrowed, char* to) const {
      std::memcpy(to, borrowed.data(), borrowed.size());
    }
  };

  Payload() = default;
  explicit Payload(std::string data) : data_(std::move(data)) {}
  Payload(std::shared_ptr<Lender> lender, uint32_t slot, absl::Span<const std::byte> bytes)
      : lender_(std::move(lender)), slot_(slot), borrowed_(bytes) {}
  ~Payload() { GiveBack(); }
  Payload(Payload&& other) noexcept { Swap(other); }
  Payload& operator=(Payload&& other) noexcept {
    Swap(other);
    return *this;
  }

  absl::Span<const std::byte> bytes() const {
    if (lender_ != nullptr) return borrowed_;
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(data_.data()), data_.size());
  }
  size_t size() const { return bytes().size(); }
  bool on_device() const { return lender_ != nullptr && lender_->on_device(); }
  // Copies what is borrowed to host memory, and gives it back.
  void Keep() {
    if (lender_ == nullptr) return;
    data_.resize(borrowed_.size());
    lender_->Read(borrowed_, data_.data());
    GiveBack();
  }

 private:
  void GiveBack() {
    if (lender_ != nullptr) std::exchange(lender_, nullptr)->GiveBack(slot_);
  }
  void Swap(Payload& other) {
    data_.swap(other.data_);
    lender_.swap(other.lender_);
    std::swap(slot_, other.slot_);
    std::swap(borrowed_, other.borrowed_);
  }

  std::string data_;
  std::shared_ptr<Lender> lender_;
  uint32_t slot_ = 0;
  absl::Span<const std::byte> borrowed_;
};

}  // namespace ballast
