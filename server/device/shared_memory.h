// Memory of a device that another process of this host imports, by a descriptor that is sent to it. Both may use it at any time,
// so nothing that is read from it may decide which memory is touched.
//
// Thread-safe. When it goes, the device has done the tasks that use it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast {

class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  // Where the device's tasks find it; the host's processors cannot read it there.
  virtual std::byte* data() const = 0;
  // At least as many as were asked for. The other process imports so many.
  virtual uint64_t bytes() const = 0;
  // As CUDA exports memory to a POSIX file descriptor. The owner of the memory closes it.
  virtual int fd() const = 0;
  // Copies bytes of this memory to the host's, and returns when they are there. What they are after the device has failed is not
  // defined.
  virtual void Read(const std::byte* from, uint64_t bytes, void* to) const = 0;
};

}  // namespace ballast
