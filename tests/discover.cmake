# ballast_discover_tests(NAME [SHARDS number] [what gtest_discover_tests takes]...) makes the tests of a GoogleTest program
# known to ctest: one by one, but under sanitizers all as one, since a sanitized program takes longer to start than most
# tests; or as so many, NAME.0 and on, that run side by side: of a program with many tests.
include(GoogleTest)

# What sanitizers leave out: tests of the tests' own checkers, which take minutes without optimization; and, but for the long
# form in soak.sh, what computes for minutes by drawn numbers alone, and kernels that the sanitizer does not see.
set(unsanitized "*SimulatorMutantTest.*")
if(NOT BALLAST_SANITIZE_LOCKSTEP)
  string(APPEND unsanitized ":*SimulatorTest.*:LossWatch.*Spike*:GpuDeviceTest.EveryKernelGivesTheCpusBits")
endif()

function(ballast_discover_tests name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SHARDS" "")
  if(NOT BALLAST_SANITIZER)
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 ${arg_UNPARSED_ARGUMENTS})
  elseif(NOT arg_SHARDS)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES ENVIRONMENT "GTEST_FILTER=-${unsanitized}")
  else()
    math(EXPR last "${arg_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${name}.${shard} COMMAND ${name})
      set_tests_properties(${name}.${shard} PROPERTIES ENVIRONMENT
                           "GTEST_FILTER=-${unsanitized};GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
  endif()
endfunction()
