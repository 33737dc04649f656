// A small segment, mapped twice as by two processes.
#pragma once

#include <memory>

#include "proto/shm/segment.h"

namespace ballast::testing {

struct ShmPair {
  static constexpr ShmShape kShape = {
      .pipe_bytes = 1024, .gradient_slots = 4, .weight_slots = 2, .gradient_slot_bytes = 256, .weight_slot_bytes = 128};

  explicit ShmPair(const ShmShape& shape = kShape)
      : daemon(ShmSegment::Create(shape).value()), trainer(ShmSegment::Map(daemon->fd(), shape).value()) {}

  const std::shared_ptr<ShmSegment> daemon, trainer;
};

}  // namespace ballast::testing
