Feature: Sums
    Scenario: Ranks add
        Given a number on each rank
        Then the sum is that of all
