// The process as the kernel sees it, under the names that every exporter uses (process_*, no ballast_).
#pragma once

#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace ballast {

// Reads /proc/self at each call; what cannot be read is left out. Thread-safe.
class ProcessMetrics : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace ballast
