// Seconds of work on a GPU, by events, and what is told of several.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/kernels/cuda/device_memory.h"

namespace ballast::kernels {

class Timer {
 public:
  Timer() {
    for (cudaEvent_t& event : events_) Check(cudaEventCreate(&event), "cudaEventCreate");
  }
  Timer(const Timer&) = delete;
  ~Timer() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  double Seconds(const std::function<void()>& work, const Stream& stream) {
    Check(cudaEventRecord(events_[0], stream.get()), "cudaEventRecord");
    work();
    Check(cudaEventRecord(events_[1], stream.get()), "cudaEventRecord");
    Check(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, events_[0], events_[1]), "cudaEventElapsedTime");
    return static_cast<double>(ms) / 1e3;
  }

 private:
  cudaEvent_t events_[2];
};

// The quartiles, as a JSON list.
inline std::string Quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return std::to_string(values[static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)))]);
  };
  return std::string("[").append(at(0.25)).append(", ").append(at(0.5)).append(", ").append(at(0.75)).append("]");
}

}  // namespace ballast::kernels
