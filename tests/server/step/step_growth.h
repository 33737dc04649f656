// What a run on several daemons costs in messages, in the step machines' time and in their memory, as ranks and parts
// grow. Measured with one staged step after another of 64 ranks and 16 parts; counted, and extrapolated, for more.
#pragma once

#include <iosfwd>

namespace ballast::sim {

void PrintGrowth(std::ostream& out);

}  // namespace ballast::sim
