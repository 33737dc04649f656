#include "server/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

prometheus::MetricFamily Sample(FamilyRef family, double value) {
  const bool counter = family->type == MetricType::kCounter;
  prometheus::MetricFamily sample{
      .name = family->name,
      .help = family->help,
      .type = counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge,
      .metric = {{}},
  };
  (counter ? sample.metric[0].counter.value : sample.metric[0].gauge.value) = value;
  return sample;
}

void AddOpenFiles(std::vector<prometheus::MetricFamily>* samples) {
  std::error_code error;
  double open = 0;
  for (std::filesystem::directory_iterator fd("/proc/self/fd", error), end; !error && fd != end; fd.increment(error)) {
    ++open;
  }
  // One of them is the iterator's own.
  if (!error && open > 0) samples->push_back(Sample("process_open_fds", open - 1));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    samples->push_back(Sample("process_max_fds", static_cast<double>(limit.rlim_cur)));
  }
}

void AddCpuSeconds(std::vector<prometheus::MetricFamily>* samples) {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return;
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  samples->push_back(Sample("process_cpu_seconds_total", seconds(usage.ru_utime) + seconds(usage.ru_stime)));
}

// Lines such as "Threads:	7" and "VmRSS:	  123 kB" (proc(5)).
void AddStatus(std::vector<prometheus::MetricFamily>* samples) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double value = 0;
    if (word == "VmRSS:" && status >> value) samples->push_back(Sample("process_resident_memory_bytes", value * 1024));
    if (word == "Threads:" && status >> value) samples->push_back(Sample("process_threads", value));
  }
}

}  // namespace

std::vector<prometheus::MetricFamily> ProcessMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> samples;
  AddOpenFiles(&samples);
  AddCpuSeconds(&samples);
  AddStatus(&samples);
  return samples;
}

}  // namespace ballast
