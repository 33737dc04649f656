// What an update of a kernel over matrices works on beside the planes, of one tensor, which is one row.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/matrix/newton_schulz.h"
#include "server/device/device.h"

namespace ballast::testing {

class MatrixRoom {
 public:
  // Nothing where the kernel is over elements. After prepare.
  void Give(UpdateTask* task) {
    if (task->kernel->fit == nullptr) return;
    kernels::Update& u = task->update;
    const uint64_t direction = kernels::PaddedElements(u.n);
    numbers_.resize(direction + kernels::OrthogonalizingRoom(1, u.n));
    u.direction = numbers_.data();
    u.rows = 1;
    u.least_norm = task->kernel->fit(1, std::max<uint64_t>(u.n, 1), u.constants);
    task->room = numbers_.data() + direction;
  }

 private:
  std::vector<float> numbers_;
};

}  // namespace ballast::testing
