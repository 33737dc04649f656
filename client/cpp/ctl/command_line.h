// From the words of the command line to a command and its invocation.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "client/cpp/ctl/command.h"

namespace ballast::ctl {

using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// Everything ballastctl does. `environment(name)` returns a variable's value.
int Main(const std::vector<std::string>& words, const Environment& environment, std::ostream& out, std::ostream& err);

// The candidates nearest to `word`, best first; empty when none is near.
std::vector<std::string> Nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ballast::ctl
