// The chaos test at length:
//
//   chaos SEED STEPS CUTS [staged] [forgetful]
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"

#include "server/base/log.h"
#include "tests/chaos/chaos.h"

namespace {

bool Parse(const std::vector<std::string>& arguments, ballast::ChaosOptions* options) {
  if (arguments.size() < 3 || !absl::SimpleAtoi(arguments[0], &options->seed) ||
      !absl::SimpleAtoi(arguments[1], &options->steps) || !absl::SimpleAtoi(arguments[2], &options->cuts)) {
    return false;
  }
  for (size_t i = 3; i < arguments.size(); ++i) {
    if (arguments[i] != "staged" && arguments[i] != "forgetful") return false;
    (arguments[i] == "staged" ? options->staged : options->forgetful) = true;
  }
  return options->steps > 0 && options->cuts > 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  ballast::ChaosOptions options;
  if (!Parse(arguments, &options)) {
    std::fputs("usage: chaos SEED STEPS CUTS [staged] [forgetful]\n", stderr);
    return 2;
  }
  ballast::ConfigureLog(ballast::LogLevel::kWarn, "text");
  const ballast::ChaosReport report = ballast::RunChaos(options);
  const std::string says = report.failure.empty() ? "not a bit is different" : report.failure;
  std::printf("chaos %s: %llu cuts, of %llu the daemon heard late, %llu chunks came twice; %s\n",
              absl::StrJoin(arguments, " ").c_str(), static_cast<unsigned long long>(report.cuts),
              static_cast<unsigned long long>(report.late), static_cast<unsigned long long>(report.duplicates),
              says.c_str());
  return report.failure.empty() ? 0 : 1;
}
