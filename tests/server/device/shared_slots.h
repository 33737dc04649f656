// What ranks sent in shared memory of a device, one slot after the other, for tests.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "server/device/device.h"

namespace ballast::testing {

class SharedSlots final : public Payload::Lender, public std::enable_shared_from_this<SharedSlots> {
 public:
  SharedSlots(Device* device, uint64_t bytes) : memory_(device->Export(bytes).value()) {}

  // A payload there, of these bytes. The test's GPU is host memory, which a trainer's would be copied to.
  Payload Put(absl::Span<const std::byte> bytes) {
    std::byte* const at = memory_->data() + taken_;
    std::memcpy(at, bytes.data(), bytes.size());
    taken_ += (bytes.size() + 1024 + 255) / 256 * 256;  // whole rows
    return Payload(shared_from_this(), lent_++, {at, bytes.size()});
  }
  void GiveBack(uint32_t) override { ++given_back_; }
  bool on_device() const override { return true; }
  void Read(absl::Span<const std::byte> borrowed, char* to) const override {
    memory_->Read(borrowed.data(), borrowed.size(), to);
  }
  uint32_t lent() const { return lent_; }
  uint32_t given_back() const { return given_back_; }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  uint64_t taken_ = 0;
  uint32_t lent_ = 0;
  std::atomic<uint32_t> given_back_ = 0;
};

}  // namespace ballast::testing
